"""When does each gradient become ready, and when is each bucket on its way?"""
