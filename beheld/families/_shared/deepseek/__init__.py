"""DeepSeek-VL2 and DeepSeek-OCR: an overview of an image and its tiles, in lines, before DeepSeek-V2's text."""
