"""What a stand-in for a trained model of routing needs beside its two halves."""

from torch import Tensor

from ecospec.data.module import Batch


class ReadsTokens:
    """`read` of a model whose hidden states come from the token ids alone."""

    def read(self, batch: Batch, chosen_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.hidden(batch.input_ids)[chosen_BT], batch.experts[chosen_BT]
