"""The plots of the report: each module draws one question's answer and says in a sentence what it shows."""
