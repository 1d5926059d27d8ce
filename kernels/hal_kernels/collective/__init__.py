"""Collectives between devices that reach each other's memory."""
