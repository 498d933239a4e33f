"""placeholder"""


def build(config):
    return []


def conclude(config, arrays):
    raise NotImplementedError


def check(config):
    pass
