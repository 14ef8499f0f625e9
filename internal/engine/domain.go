package engine

import (
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// domain tells what one engine deploys from what other engines, of other hubs or for other registrations, deploy on the same cluster.
// That of the Sveltos surface is the zero one.
type domain struct{ hub, scope string }

// sign returns who deploys for id: as it is in the marks of an object, see live.signature.
func (d domain) sign(id bundle.ID) string { return d.signature(id.String()) }

func (d domain) signature(requestor string) string {
	if d == (domain{}) || requestor == "" {
		return requestor
	}
	return requestor + " in " + d.scope + " of " + d.hub
}

// mark adds to the marks of an object which domain it is of.
func (d domain) mark(annotations map[string]string) {
	if d.hub != "" {
		annotations[kube.AnnotationHub] = d.hub
	}
	if d.scope != "" {
		annotations[kube.AnnotationScope] = d.scope
	}
}

// key names d in the labels of records, "" being the zero domain.
func (d domain) key() string {
	if d == (domain{}) {
		return ""
	}
	return shortHash([]byte(d.scope + " of " + d.hub))
}

// hubKey names the hub of d in the labels of records, "" if there is none.
func (d domain) hubKey() string {
	if d.hub == "" {
		return ""
	}
	return shortHash([]byte(d.hub))
}

// domain returns whose engine has marked the object.
func (l *live) domain() domain {
	return domain{hub: l.annotations[kube.AnnotationHub], scope: l.annotations[kube.AnnotationScope]}
}

// signature tells which bundle of which domain the object is marked for, "" if none is.
func (l *live) signature() string { return l.domain().signature(l.requestor()) }
