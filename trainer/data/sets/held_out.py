"""The set of samples that are named for the validation loss alone."""

from __future__ import annotations

from trainer.config.schema import DataSet, ValidationSection


def held_out_sets(validation: ValidationSection) -> tuple[DataSet, ...]:
    """The samples that `validation` names, as one set; none where it names none."""
    if not validation.names_samples:
        return ()
    one = DataSet(
        img_dir=validation.img_dir,
        control_dir=validation.control_dir,
        chat_file=validation.chat_file,
        columns=validation.columns,
        dataset_info=validation.dataset_info,
        name=validation.name,
    )
    return (one,)
