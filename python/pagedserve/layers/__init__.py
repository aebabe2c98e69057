"""What layers of transformers' models are made of, for those who exchange them."""
