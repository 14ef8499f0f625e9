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

// WithPending returns the results to store for a rendering that is not deployed. g has its results, and former the
// results of the deployed rendering. The result has the rendered objects of former, which the member has and lookup
// must find until the member deploys the rendering. The rendered objects of g become pending objects. rendering is an
// ID of the rendering, to be passed to PromotePending.
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

// PromotePending returns g without pending objects. If they are of rendering, which is the deployed one, they replace
// the rendered objects.
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
