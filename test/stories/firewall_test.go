package stories

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube"
)

// firewall is what many sites have: whoever is inside may talk to anybody, and nobody outside may begin.
const firewall = `
table inet site {
	chain input {
		type filter hook input priority filter; policy drop;
		iif lo accept
		ct state established,related accept
	}
}
`

const walledProfile = `
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: delivered}
    data: {text: %[2]q}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {site: %[1]s}}
  syncMode: Continuous
  policyRefs: [{kind: ConfigMap, namespace: default, name: %[1]s}]
`

// TestFirewall joins members that the hub cannot reach, each in a network of its own: one whose firewall drops whatever
// comes in, and one that has no route out either, but an HTTP proxy.
func TestFirewall(t *testing.T) {
	awaitTurn(t)
	nets := networks(t, 4)
	hub, walled, proxied, dmz := nets[0], nets[1], nets[2], nets[3]
	inside(t, hub, "", "ip", "address", "add", hubAddress+"/32", "dev", "lo")
	cable(t, plug{hub, "to-walled", "10.231.1.1/30"}, plug{walled, "to-hub", "10.231.1.2/30"})
	cable(t, plug{hub, "to-dmz", "10.231.2.1/30"}, plug{dmz, "to-hub", "10.231.2.2/30"})
	cable(t, plug{dmz, "to-proxied", "10.231.3.1/30"}, plug{proxied, "to-dmz", "10.231.3.2/30"})
	inside(t, walled, "", "ip", "route", "add", hubAddress+"/32", "via", "10.231.1.1")
	inside(t, dmz, "", "ip", "route", "add", hubAddress+"/32", "via", "10.231.2.1")
	w := newWorld(t, localkube.WithNetwork(hub, hubAddress))

	t.Run("inbound dropped", func(t *testing.T) {
		t.Parallel()
		m := w.behind(t, "walled", uplink{"to-walled", walled}, localkube.WithNetwork(walled, "10.231.1.2"))
		if err := dial(t, hub, m.address()); err != nil {
			t.Errorf("without a firewall the hub cannot dial the member, so this story shows nothing: %v", err)
		}
		inside(t, walled, firewall, "nft", "-f", "-")
		m.livesThere(func() {
			if err := dial(t, hub, m.address()); err == nil {
				t.Errorf("the hub can dial the member at %s in spite of its firewall", m.address())
			}
		})
	})
	t.Run("behind a proxy", func(t *testing.T) {
		t.Parallel()
		m := w.behind(t, "proxied", uplink{"to-dmz", dmz}, localkube.WithNetwork(proxied, "10.231.3.2"))
		proxy := serveProxy(t, dmz, "10.231.3.1:3128", w.hubHost())
		m.flags = []string{"--proxy-url=http://10.231.3.1:3128"}
		m.livesThere(func() {
			for from, to := range map[localkube.Network]string{proxied: w.hubHost(), hub: m.address()} {
				if err := dial(t, from, to); err == nil {
					t.Errorf("%s can be dialled directly", to)
				}
			}
		})
		proxy.want(t)
	})
}

// uplink is the cable that leads from the hub to a member, or to its proxy.
type uplink struct {
	// device is the hub's end of it, and far the network at the other end.
	device string
	far    localkube.Network
}

// walledMember is a member in a network that the hub cannot dial into.
type walledMember struct {
	*world
	plane  *localkube.Plane
	name   string
	uplink uplink
	// flags are further ones for its registration.
	flags []string
}

// behind starts a member in a network.
func (w *world) behind(t *testing.T, name string, up uplink, where localkube.Option) *walledMember {
	t.Helper()
	inner := *w
	inner.t = t
	plane := localkube.ForTest(t, localkube.Named(name), localkube.WithExec(join.DefaultAgentImage, w.binary("towline-agent")), where)
	return &walledMember{world: &inner, plane: plane, name: name, uplink: up}
}

// livesThere takes the member through its life. unreachable checks that it cannot be dialled; it is called before and
// after.
func (m *walledMember) livesThere(unreachable func()) {
	m.t.Helper()
	began := time.Now()
	step := func(what string) { m.t.Logf("%s: %s after %.1f s", m.name, what, time.Since(began).Seconds()) }
	unreachable()
	m.register()
	step("registered")
	m.apply(m.hub, fmt.Sprintf(walledProfile, m.name, "first"))
	m.delivered("first")
	step("deployed")
	m.heals()
	step("healed")
	m.withoutLink(func() {
		m.heals()
		m.apply(m.hub, fmt.Sprintf(walledProfile, m.name, "second"))
	})
	step("healed without the hub")
	m.delivered("second")
	step("caught up")
	m.kubectl(m.hub, "label", "sveltoscluster", m.name, "-n", "sites", "site-")
	m.withdrawn()
	step("withdrawn")
	m.kubectl(m.hub, "label", "sveltoscluster", m.name, "-n", "sites", "site="+m.name)
	m.delivered("second")
	unreachable()
	m.deregister()
	step("deregistered")
}

func (m *walledMember) register() {
	m.t.Helper()
	args := []string{"register", "cluster", "--namespace=sites", "--cluster=" + m.name, "--pullmode", "--labels=site=" + m.name}
	m.apply(m.plane, m.run(m.hub, "sveltosctl", append(args, m.flags...)...))
	m.ready("sites", m.name)
}

// object reads what the profile delivers.
func (m *walledMember) object() (*corev1.ConfigMap, error) {
	object := &corev1.ConfigMap{}
	err := m.client(m.plane).Get(m.t.Context(), client.ObjectKey{Namespace: "default", Name: "delivered"}, object)
	return object, err
}

func (m *walledMember) delivered(text string) {
	m.t.Helper()
	m.eventually("the member "+m.name+" has the "+text+" edition", func() error {
		object, err := m.object()
		if err == nil && object.Data["text"] != text {
			err = fmt.Errorf("it says %q", object.Data["text"])
		}
		return err
	})
	m.provisioned("sites", m.name+"-sveltos-"+m.name)
}

// heals deletes what was delivered and waits until it is back.
func (m *walledMember) heals() {
	m.t.Helper()
	before, err := m.object()
	if err == nil {
		err = m.client(m.plane).Delete(m.t.Context(), before)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	m.eventually("a deleted object is back on "+m.name, func() error {
		object, err := m.object()
		if err == nil && object.UID == before.UID {
			err = errors.New("it is still there")
		}
		return err
	})
}

// withoutLink does something while the hub's cable is unplugged.
func (m *walledMember) withoutLink(do func()) {
	m.t.Helper()
	inside(m.t, m.hub.Network(), "", "ip", "link", "set", m.uplink.device, "down")
	if err := dial(m.t, m.uplink.far, m.hubHost()); err == nil {
		m.t.Errorf("the hub can be dialled from %s while its cable is unplugged", m.name)
	}
	do()
	inside(m.t, m.hub.Network(), "", "ip", "link", "set", m.uplink.device, "up")
}

func (m *walledMember) withdrawn() {
	m.t.Helper()
	m.eventually("the object is withdrawn from "+m.name, func() error { return gone(m.object()) })
}

// gone says what is wrong unless reading an object found none.
func gone(_ any, err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("want not found, got %w", errors.Join(err, errors.New("an answer")))
}

// deregister takes the member out of the fleet: it keeps neither what was delivered nor the agent.
func (m *walledMember) deregister() {
	m.t.Helper()
	out := m.run(m.hub, "sveltosctl", "deregister", "cluster", "--namespace=sites", "--cluster="+m.name)
	if want := "Successfully deregistered cluster sites/" + m.name; !strings.HasPrefix(out, want) {
		m.t.Errorf("deregister printed %q, want it to begin with %q", out, want)
	}
	m.withdrawn()
	m.eventually("the agent has left "+m.name, func() error {
		member, ctx := m.client(m.plane), m.t.Context()
		return errors.Join(
			gone(nil, member.Get(ctx, types.NamespacedName{Name: "projectsveltos"}, &corev1.Namespace{})),
			gone(nil, member.Get(ctx, types.NamespacedName{Name: "sveltos-applier-manager-role"}, &rbacv1.ClusterRole{})),
		)
	})
	if out := m.kubectl(m.hub, "get", "sveltosclusters,serviceaccounts,leases", "-n", "sites", "-o", "name"); strings.Contains(out, "/"+m.name) {
		m.t.Errorf("after %s was deregistered the hub has %q", m.name, out)
	}
}

// address is where the member's API server listens.
func (m *walledMember) address() string { return hostOf(m.t, m.plane) }

// hubHost is where the hub's API server listens.
func (w *world) hubHost() string { return hostOf(w.t, w.hub) }

func hostOf(t *testing.T, plane *localkube.Plane) string {
	t.Helper()
	address, err := url.Parse(plane.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort(address.Hostname(), address.Port())
}
