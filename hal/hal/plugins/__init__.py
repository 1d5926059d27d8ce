"""Plug-ins: listed without import, probed in child processes, loaded one at a time.

`listing` lists, the files that begin with `probe` probe, `survey` puts both together, `manager` loads,
`registry` answers for devices, `calls` has one typed wrapper per hook, `states` the outcomes.
"""
