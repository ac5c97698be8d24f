"""How does a trained model leave the process, whatever it was split over, and come back?

    weights = full_state_dict(model)                # rank 0: plain tensors, names of Hugging Face
    if rank == 0:
        export_hf(weights, config, tokenizer, "out", bos_token="<s>", eos_token="</s>")
    model = Llama.from_hf_state_dict(*load_hf("out")[:2])

One file a question: gather.py (what does rank 0 hold?), export.py and load.py (Hugging Face's
format), final.py (model, optimizer and manifest at the end of a run).
"""

from labsupport.checkpoint.export import check_export, export_hf
from labsupport.checkpoint.final import FinalCheckpoint, load_final, save_final
from labsupport.checkpoint.gather import full_optimizer_state_dict, full_state_dict, whole
from labsupport.checkpoint.load import HfModel, load_hf

__all__ = [
    "FinalCheckpoint",
    "HfModel",
    "check_export",
    "export_hf",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_final",
    "load_hf",
    "save_final",
    "whole",
]
