package spaces

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// patience remembers how long Clusters that leave have stood still. A hub that starts anew is patient once more. The zero value is ready.
type patience struct {
	// mu guards vigils.
	mu     sync.Mutex
	vigils map[types.UID]*vigil
}

// vigil is what is waited for of one Cluster.
type vigil struct {
	left  string
	since time.Time
	told  string
}

func (p *patience) vigil(cluster types.UID) *vigil {
	if p.vigils == nil {
		p.vigils = map[types.UID]*vigil{}
	}
	if p.vigils[cluster] == nil {
		p.vigils[cluster] = &vigil{}
	}
	return p.vigils[cluster]
}

// still returns how long what is left has been the same.
func (p *patience) still(cluster types.UID, left string, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.vigil(cluster)
	if v.left != left {
		v.left, v.since = left, now
	}
	return now.Sub(v.since)
}

// news says whether this is the first time that text is told of the Cluster, last.
func (p *patience) news(cluster types.UID, text string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.vigil(cluster)
	defer func() { v.told = text }()
	return v.told != text
}

// end forgets a Cluster.
func (p *patience) end(cluster types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.vigils, cluster)
}
