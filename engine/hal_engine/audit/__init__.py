"""The audit of a model: runs it, watches every call, and compares with the plan down to the leaf.

`running.audit_model` is the entrance; its answer is an `AuditReport` of `hal.auditing`.
"""
