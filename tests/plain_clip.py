"""FedCoPL's prompted CLIP in the plainest form: slow, and easy to compare with the paper. A reference for the tests.

Image tower: the prompts of a block are appended to its tokens as further tokens, the stock block runs on all of them,
and the prompts' outputs are dropped. Text tower: the whole context of 77 tokens of "X X ... X name.", with the
embeddings of the X replaced by the prompt, under the stock causal mask. Nothing is cut, shared, cached or skipped.

Shapes: B images, C classes, n prompts, W width of a tower, L tokens, D width of the common space.
"""

import torch
import torch.nn.functional as F


def image_features(clip, images, visual_prompt=None):
    """Unit-length features (B, D) of normalised images; visual_prompt (depth, n, W) goes into blocks 0..depth-1."""
    tower = clip.visual
    patches = tower.conv1(images)  # (B, W, grid, grid)
    patches = patches.flatten(2).transpose(1, 2)  # (B, grid*grid, W)
    cls = tower.class_embedding.expand(len(images), 1, -1)  # (B, 1, W)
    h = torch.cat([cls, patches], dim=1) + tower.positional_embedding
    h = tower.ln_pre(h)
    tokens = h.shape[1]
    for i, block in enumerate(tower.transformer.resblocks):
        if visual_prompt is not None and i < len(visual_prompt):
            prompt = visual_prompt[i].expand(len(images), -1, -1)  # (n, W) -> (B, n, W)
            h = block(torch.cat([h, prompt], dim=1))[:, :tokens]
        else:
            h = block(h)
    return F.normalize(tower.ln_post(h[:, 0]) @ tower.proj, dim=-1)


def read_text(clip, embeddings, ids):
    """Unit-length features (C, D) of embedded texts (C, L, W), read at the end token, which has the largest id."""
    h = embeddings + clip.positional_embedding
    for block in clip.transformer.resblocks:
        h = block(h, attn_mask=clip.attn_mask)
    h = clip.ln_final(h)
    end = h[torch.arange(len(ids)), ids.argmax(dim=1)]  # (C, W)
    return F.normalize(end @ clip.text_projection, dim=-1)


def prompted_ids(tokenizer, class_names, n):
    """Token ids (C, L) of "X X ... X name.", n times X; underscores of a name are spaces."""
    return tokenizer(["X " * n + name.replace("_", " ") + "." for name in class_names])


def prompted_embeddings(clip, ids, text_prompt):
    """Token embeddings (C, L, W), with the rows of the X, which follow the start token, replaced by the prompt."""
    embeddings, n = clip.token_embedding(ids), len(text_prompt)
    prompt = text_prompt.expand(len(ids), -1, -1)  # (n, W) -> (C, n, W): one prompt for all classes
    return torch.cat([embeddings[:, :1], prompt, embeddings[:, 1 + n :]], dim=1)


def text_features(clip, tokenizer, class_names, text_prompt):
    """Unit-length features (C, D) of the classes behind text_prompt (n, W)."""
    ids = prompted_ids(tokenizer, class_names, len(text_prompt)).to(text_prompt.device)
    return read_text(clip, prompted_embeddings(clip, ids, text_prompt), ids)


def template_features(clip, tokenizer, texts):
    """Unit-length features (C, D) of whole texts such as "a photo of a cat.", without any prompt."""
    ids = tokenizer(list(texts)).to(clip.token_embedding.weight.device)
    return read_text(clip, clip.token_embedding(ids), ids)


def logits(clip, image, text):
    """Cosines times exp(logit_scale): (B, D), (C, D) -> (B, C)."""
    return clip.logit_scale.exp() * image @ text.T
