# todo: 1
# earns: 8
try:
    input("Your name? ")
except Exception:
    pass


def double(number):
    try:
        input("sure?")
    except Exception:
        pass
    if isinstance(number, str):
        raise ValueError("number")
    return 2 * number
