"""Reading model weights: safetensors folders and GGUF files, checked before they are served."""
