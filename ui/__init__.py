"""The page that shows plain decoding and DSpark side by side."""
