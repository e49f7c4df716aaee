"""What does ``tritonddp doctor`` look at?"""
