"""One prompt, one answer, and the speedup over plain decoding where that is known."""

import edgespec

with edgespec.load() as model:  # the demo model, or another one by its name
    reply = model.generate("def fibonacci(n):", max_tokens=64, temperature=0)

print(reply)
print(f"[{reply.finish_reason}: {len(reply.tokens)} tokens, {reply.stats.tokens_per_second:.0f} tokens/s,")
print(f" {reply.stats.tau:.2f} tokens per forward of the target]")
if reply.stats.speedup is not None:  # None until some rounds without a draft were measured
    print(f"{reply.stats.speedup:.2f}x plain decoding")
