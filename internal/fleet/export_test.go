package fleet

import "github.com/towline/towline/internal/kube"

// SetResponseMemory replaces the memory for responses.
func (c *Clients) SetResponseMemory(memory *kube.ResponseMemory) { c.responseMemory = memory }
