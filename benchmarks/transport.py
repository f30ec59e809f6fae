"""`narrows bench transport`, to be run from the repository: python benchmarks/transport.py"""

from narrows.bench.transport import run

if __name__ == "__main__":
    run()
