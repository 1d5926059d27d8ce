"""Plug-ins: listed without import, probed in child processes, loaded one at a time.

`listing` lists, `probe` and the files named after it probe, `survey` puts both together,
`manager` loads, `registry` answers for devices, `calls` has one typed wrapper per hook, `states`
the outcomes.
"""
