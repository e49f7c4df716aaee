"""IN WHOSE MEMORY gradients are reduced if they are not copied: the bucket's, or their own."""
