"""What does an option cost, and does it do what it promises?"""
