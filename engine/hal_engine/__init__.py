"""The serving engine: config, loader, models, KV cache, scheduler, runner, server."""
