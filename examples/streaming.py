"""Text as it is generated; drafted tokens are between « and »."""

import edgespec

with edgespec.load(draft="ngram", draft_max=5) as model:
    for piece in model.stream("def read_lines(path):\n", max_tokens=96, temperature=0):
        print(f"«{piece.text}»" if piece.drafter else piece.text, end="", flush=True)
    print()
    print(f"{model.stats.accepted_tokens} of {model.stats.emitted_tokens} tokens were drafted.")
