"""Prepare what a student learns from a teacher, so that training does not run the teacher."""
