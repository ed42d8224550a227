"""Twenty beginnings of Python code, which the trained pair can continue."""

from __future__ import annotations

CODE = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n    ",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n    x: int\n",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(description=__doc__)\n",
    'class Node:\n    """A node of a linked list."""\n\n    def __init__(self, value, next=None):\n',
    "try:\n    import json\nexcept ImportError:\n",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n",
    "def main():\n    logging.basicConfig(level=logging.INFO)\n    logger = logging.getLogger(__name__)\n",
    "for line in file:\n    line = line.strip()\n    if not line or line.startswith('#'):\n",
    "def flatten(items):\n    result = []\n    for item in items:\n        if isinstance(item, list):\n",
    "class Config(dict):\n    def __getattr__(self, name):\n        try:\n            return self[name]\n",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n",
    "with open(path, 'w', encoding='utf-8') as file:\n    json.dump(",
    "def retry(function, attempts=3, delay=1.0):\n    for attempt in range(attempts):\n        try:\n",
    "import threading\n\n\nclass Worker(threading.Thread):\n    def run(self):\n        while not self.stopped:\n",
    "def matrix_multiply(a, b):\n    rows, columns = len(a), len(b[0])\n    result = []\n",
    "if __name__ == '__main__':\n    sys.exit(",
    'def to_roman(number):\n    """Convert an integer to a Roman numeral."""\n    numerals = [\n',
)
