"""What does the wrapper cost the host, by parameter, by bucket, by launch?"""
