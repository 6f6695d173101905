"""A loss as a label, for names, and in words, for people; both from its values."""

from __future__ import annotations

from .schema import LossConfig, LossKind, Normalisation, Supervision


def loss_label(loss: LossConfig) -> str:
    """`kl`, `kl+0.1tv`, `lk-decay0.8-sequence-both`: from the values, with what is not the default."""
    parts = [
        "+".join(("" if weight == 1 else f"{weight:g}") + kind.value for kind, weight in loss.terms()),
        *([f"eta{loss.lk_eta:g}"] if loss.lk_eta != LossConfig.lk_eta else []),
        *([f"decay{loss.step_decay:g}"] if loss.step_decay != 1 else []),
        *([loss.normalisation.value] if loss.normalisation is not Normalisation.token else []),
        *([loss.supervision.value] if loss.supervision is not Supervision.input_token else []),
    ]
    return "-".join(parts)


_LOSSES = {
    LossKind.kl: "forward KL",
    LossKind.reverse_kl: "reverse KL",
    LossKind.js: "Jensen-Shannon",
    LossKind.ce: "cross entropy with the verifier's argmax",
    LossKind.tv: "total variation",
    LossKind.lk: "hybrid LK",
}
_MEANS = {
    Normalisation.token: "mean over the update's supervised tokens",
    Normalisation.pack: "mean over the update's packs of their means",
    Normalisation.sequence: "mean over the update's rows of their means",
}
_RULES = {
    Supervision.input_token: "supervised by input token",
    Supervision.predicted_token: "supervised by predicted token",
    Supervision.both: "supervised by input and predicted token",
}


def describe_loss(loss: LossConfig) -> str:
    """The loss in words, for people."""
    terms = [
        ("" if weight == 1 else f"{weight:g} x ")
        + _LOSSES[kind]
        + (f" (eta {loss.lk_eta:g})" if kind is LossKind.lk else "")
        for kind, weight in loss.terms()
    ]
    decay = f"step k weighs {loss.step_decay:g}**k" if loss.step_decay != 1 else "all steps weigh the same"
    return f"{' + '.join(terms)}, {decay}, {_MEANS[loss.normalisation]}, {_RULES[loss.supervision]}"
