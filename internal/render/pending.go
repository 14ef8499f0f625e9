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

// WithPending returns g, the results of a rendering that is not deployed, with the rendered objects of former, the
// results of the deployed rendering. The rendered objects of g become pending objects: until the member deploys the
// rendering, it has the objects of former, and lookup must find these. rendering is the ID that PromotePending gets.
func (g Generated) WithPending(rendering string, former Generated) (Generated, error) {
	objects, deployed := g.renderedObjects(), former.renderedObjects()
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

// PromotePending returns g without pending objects. If the pending objects are of the given rendering, they replace the
// rendered objects.
func (g Generated) PromotePending(rendering string) (Generated, error) {
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

// renderedObjects returns the rendered objects of g that are not pending.
func (g Generated) renderedObjects() Generated {
	objects := Generated{}
	for key, object := range g {
		if strings.HasPrefix(key, renderedPrefix) {
			objects[key] = object
		}
	}
	return objects
}
