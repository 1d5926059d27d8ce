"""The op catalogue: one file per op family."""
