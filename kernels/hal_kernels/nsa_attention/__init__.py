"""Native sparse attention: compressed, selected and sliding branches under gates."""
