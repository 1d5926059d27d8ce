"""The plain-torch reference of every op, offered as candidates on any device."""
