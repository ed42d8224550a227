"""Trained heads: small networks that draft from a target's hidden states. What a head's file says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

HEAD_HINT = "Download the head again, or use --draft ngram."
HeadKind = Literal["eagle3", "eagle", "mtp", "gemma4-assistant", "dflash", "dspark", "medusa", "hydra"]
USUAL_BLOCK = 16  # positions of a DFlash block if its file states none, as llama.cpp has it


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head, whatever format its file has.

    hidden_size         of the target; 0 if the file does not say
    layers              of the target, whose inputs are concatenated in this order: 0 has the embeddings, the number of
                        layers names the output of the last one before the final norm. Empty: the last hidden state
                        after the final norm. None: the file does not say, see `complete`
    size                the head's own hidden size
    norm_before_residual  EAGLE-3: whether the residual starts from the normed feature
    norm_before_fc      EAGLE-3: 'all' norms the concatenated features, 'each' every one of them (EAGLE-3.1)
    feeds_normed        whether the head's state is fed back after its last norm
    block_size          positions of a block, of heads that draft one
    mask_token          the id that fills a block
    predicts_at_root    DSpark: whether the first row of a block, the root's, predicts too
    in_target           whether the file holds the target too
    """

    kind: HeadKind
    hidden_size: int
    layers: tuple[int, ...] | None
    size: int
    norm_before_residual: bool = False
    norm_before_fc: Literal["none", "all", "each"] = "none"
    feeds_normed: bool = False
    block_size: int = 1
    mask_token: int | None = None
    predicts_at_root: bool = False
    in_target: bool = False

    def complete(self, target_layers: int) -> HeadSpec:
        """Names the layers that EAGLE-3 heads read of a target with `target_layers`, if the file names none."""
        usual = 2, target_layers // 2, target_layers - 3
        return self if self.layers is not None else replace(self, layers=usual)
