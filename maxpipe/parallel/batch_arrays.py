"""Names of the batch arrays of images, without jax."""

IMAGES = "images"
"""Images, uint8 `[B, N, H, W, 3]`. Unused entries are 0."""
IMAGE_FEATURES = "image_features"
"""Embeddings of the images `[B, N * K, D]`, which replace `images` before the tick loop."""
IMAGE_TOKENS_LEFT = "image_tokens_left"
"""Number of tokens of an image from each of its tokens to its last token, int32 `[B, T]`; 0 for
text."""
