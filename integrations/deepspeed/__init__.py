if __name__ != "evenload.integrations.deepspeed":
    raise ImportError(f"{__name__}: import this package as evenload.integrations.deepspeed; a second copy would mean a second registry")
