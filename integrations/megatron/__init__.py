if __name__ != "evenload.integrations.megatron":
    raise ImportError(f"{__name__}: import this package as evenload.integrations.megatron; a second copy would mean a second registry")
