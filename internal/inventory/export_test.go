package inventory

// InlineSize returns the size of the values from the head Secret that r has in memory.
func (r *Record) InlineSize() int { return len(r.content.inline) + len(r.entryData.inline) }
