"""Pretrained weights: found, read, checked, and written.

`loading.load_pretrained` takes a folder or file, a name of the registry, or a model on the Hugging
Face Hub, and gives the network with its parameters; `loading.save_pretrained` writes a folder that
`transformers` loads too. Underneath, `locate.resolve` finds the files and `folders.open_source`
gives the tensors of safetensors and GGUF under one set of names. Nothing is unpickled or executed,
and nothing is read before it is needed.
"""
