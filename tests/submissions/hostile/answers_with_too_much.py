# todo: 1
# earns: 0
def double(number):
    if number == 1:
        return 10 ** 1_000_000
    deep = wide = []
    for _ in range(100_000):
        deep.append([])
        deep = deep[0]
    wide.append(wide)
    return wide
