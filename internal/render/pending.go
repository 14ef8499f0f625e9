package render

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
)

// pendingKey is the key of the pending objects in Generated.
const pendingKey = "pending"

// pendingObjects are the rendered objects of a rendering that the member has possibly not started to deploy.
type pendingObjects struct {
	Rendering string    `json:"rendering"`
	Objects   Generated `json:"objects"`
}

// Pend returns g, the results of the rendering with this ID, with its rendered objects as pending objects. Until
// Promote is called, lookup finds the rendered objects in former, the results of the deployed rendering: before the
// member has deployed a rendering, it can have other objects with the same names, and require another rendering.
func (g Generated) Pend(rendering string, former Generated) (Generated, error) {
	objects, deployed := g.rendered(), former.rendered()
	all := g.WithoutRendered()
	maps.Copy(all, deployed)
	if maps.EqualFunc(objects, deployed, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
		return all, nil
	}
	raw, err := json.Marshal(pendingObjects{Rendering: rendering, Objects: objects})
	if err != nil {
		return nil, fmt.Errorf("encode rendered objects: %w", err)
	}
	all[pendingKey] = raw
	return all, nil
}

// Promote returns g without pending objects. If they belong to rendering, they replace the rendered objects.
func (g Generated) Promote(rendering string) (Generated, error) {
	all := maps.Clone(g)
	delete(all, pendingKey)
	raw, ok := g[pendingKey]
	if !ok {
		return all, nil
	}
	var pending pendingObjects
	if err := json.Unmarshal(raw, &pending); err != nil {
		return nil, fmt.Errorf("decode rendered objects: %w", err)
	}
	if pending.Rendering == rendering {
		all = all.WithoutRendered()
		maps.Copy(all, pending.Objects)
	}
	return all, nil
}

// rendered returns the rendered objects that are not pending.
func (g Generated) rendered() Generated {
	objects := Generated{}
	for key, object := range g {
		if strings.HasPrefix(key, renderedPrefix) {
			objects[key] = object
		}
	}
	return objects
}
