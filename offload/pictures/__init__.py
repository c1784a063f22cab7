"""What is shown: pictures of plans and steps, and pages of HTML that hold them."""
