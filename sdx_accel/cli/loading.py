"""From a prepared job to a pipeline that can make it, and to the arguments of its call.

Knows diffusers' pipelines by their public calls; decides nothing that a plan depends on.
"""

from typing import Any

from sdx_accel.cli.adapters import in_canonical_order
from sdx_accel.cli.prepare import Prepared
from sdx_accel.cli.talk import Talk

__all__ = ["load_pipeline", "picture_arguments"]


def load_pipeline(prepared: Prepared, device: str, talk: Talk) -> Any:
    """The job's pipeline on the CPU, with everything that the job adds to the model.

    Args:
        prepared: from `prepare`.
        device: where it will run, which decides the dtype.
        talk: where notes go.

    Raises:
        SdxError: weights are missing, broken or of another model.
    """
    from sdx_accel.runtime.checkpoints import load

    job = prepared.job
    pipe = load(
        job.model, dtype=job.dtype, config=job.config, scheduler=job.scheduler, device=device
    )
    if job.loras:
        from sdx_accel.runtime.loras import load_loras

        loras = in_canonical_order(job.loras)
        for report in load_loras(pipe, [(lora.path, lora.scale) for lora in loras]):
            if report.matched < report.total:
                talk.note(str(report))
    if job.embeddings:
        from sdx_accel.runtime.textual_inversion import load_embeddings

        load_embeddings(pipe, [(part.path, part.token) for part in job.embeddings])
    if job.ip_adapters:
        from sdx_accel.runtime.ip_adapters import load_ip_adapters

        adapters = [(adapter.path, adapter.scale) for adapter in job.ip_adapters]
        load_ip_adapters(pipe, adapters, prepared.description)
    if job.refiner is not None:
        from sdx_accel.runtime.refiner import join_refiner

        pipe = join_refiner(pipe, job.refiner, prepared.description)
        pipe.set_progress_bar_config(disable=True)
        return pipe
    pipe = _for_kind(pipe, job.kind, **_controlnets(prepared, pipe))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _controlnets(prepared: Prepared, pipe: Any) -> dict[str, Any]:
    if not prepared.job.controlnets:
        return {}
    from sdx_accel.runtime.controlnets import load_controlnet
    from sdx_accel.runtime.pipeline_parts import numbered

    components = prepared.description.components
    nets = [
        load_controlnet(net.path, components[numbered("controlnet", index)], pipe.unet.dtype)
        for index, net in enumerate(prepared.job.controlnets)
    ]
    return {"controlnet": nets[0] if len(nets) == 1 else nets}


def _for_kind(pipe: Any, kind: str, **parts: Any) -> Any:
    """The same models in the pipeline that makes this kind of picture."""
    import diffusers

    if kind == "text" and not parts:
        return pipe
    switch = {
        "text": diffusers.AutoPipelineForText2Image,
        "image": diffusers.AutoPipelineForImage2Image,
        "inpaint": diffusers.AutoPipelineForInpainting,
    }[kind]
    return switch.from_pipe(pipe, **parts)


def picture_arguments(prepared: Prepared) -> dict[str, Any]:
    """The pictures and the size of a pipeline's call.

    Args:
        prepared: from `prepare`.
    """
    job = prepared.job
    size = {"width": job.width, "height": job.height}
    guides = [guide.resized(**size) for guide in prepared.guides]
    scales = [net.scale for net in job.controlnets]
    one = len(guides) == 1
    control: dict[str, Any] = {}
    if guides:
        # without a picture to start from, diffusers calls the ControlNet's own one `image`
        name = "image" if prepared.image is None else "control_image"
        control = {
            name: guides[0] if one else guides,
            "controlnet_conditioning_scale": scales[0] if one else scales,
        }
    if prepared.prompts:
        control["ip_adapter_image"] = [prompt.picture for prompt in prepared.prompts]
    if job.refiner is not None:
        control["refiner_start"] = job.refiner_start
    if prepared.image is None:
        return {**size, **control}
    image = {"image": prepared.image.resized(**size), "strength": job.strength, **control}
    if prepared.mask is None:
        # pipelines of UNets follow the picture, those of transformers have a size of their own
        return {**image, **size} if "transformer" in prepared.description.components else image
    return {**image, **size, "mask_image": prepared.mask.resized(**size)}
