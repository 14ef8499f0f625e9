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

// firewall allows connections from inside to any address, and no new connections from outside.
const firewall = `
table inet site {
	chain input {
		type filter hook input priority filter; policy drop;
		iif lo accept
		ct state established,related accept
	}
}
`

const firewalledProfile = `
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

// TestFirewall registers members that the hub cannot dial, each in its own network: one behind a firewall that drops
// inbound packets, and one without a route out, which reaches the hub through an HTTP proxy.
func TestFirewall(t *testing.T) {
	awaitSlot(t)
	nets := newNetworks(t, 4)
	hub, walled, proxied, dmz := nets[0], nets[1], nets[2], nets[3]
	runInNetwork(t, hub, "", "ip", "address", "add", hubAddress+"/32", "dev", "lo")
	connectNetworks(t, cableEnd{hub, "to-walled", "10.231.1.1/30"}, cableEnd{walled, "to-hub", "10.231.1.2/30"})
	connectNetworks(t, cableEnd{hub, "to-dmz", "10.231.2.1/30"}, cableEnd{dmz, "to-hub", "10.231.2.2/30"})
	connectNetworks(t, cableEnd{dmz, "to-proxied", "10.231.3.1/30"}, cableEnd{proxied, "to-dmz", "10.231.3.2/30"})
	runInNetwork(t, walled, "", "ip", "route", "add", hubAddress+"/32", "via", "10.231.1.1")
	runInNetwork(t, dmz, "", "ip", "route", "add", hubAddress+"/32", "via", "10.231.2.1")
	w := newWorld(t, localkube.WithNetwork(hub, hubAddress))

	t.Run("inbound dropped", func(t *testing.T) {
		t.Parallel()
		m := w.startFirewalledMember(t, "walled", uplink{"to-walled", walled}, localkube.WithNetwork(walled, "10.231.1.2"))
		if err := dial(t, hub, m.address()); err != nil {
			t.Errorf("without a firewall the hub cannot dial the member, so this story shows nothing: %v", err)
		}
		runInNetwork(t, walled, firewall, "nft", "-f", "-")
		m.runLifecycle(func() {
			if err := dial(t, hub, m.address()); err == nil {
				t.Errorf("the hub can dial the member at %s in spite of its firewall", m.address())
			}
		})
	})
	t.Run("behind a proxy", func(t *testing.T) {
		t.Parallel()
		m := w.startFirewalledMember(t, "proxied", uplink{"to-dmz", dmz}, localkube.WithNetwork(proxied, "10.231.3.2"))
		proxy := serveProxy(t, dmz, "10.231.3.1:3128", w.hubHost())
		m.flags = []string{"--proxy-url=http://10.231.3.1:3128"}
		m.runLifecycle(func() {
			for from, to := range map[localkube.Network]string{proxied: w.hubHost(), hub: m.address()} {
				if err := dial(t, from, to); err == nil {
					t.Errorf("%s can be dialled directly", to)
				}
			}
		})
		proxy.wantOnlyGranted(t)
	})
}

// uplink is the cable from the hub to a member, or to its proxy.
type uplink struct {
	// device is the hub's end of it, and far the network at the other end.
	device string
	far    localkube.Network
}

// firewalledMember is a member in a network that the hub cannot dial into.
type firewalledMember struct {
	*world
	plane  *localkube.Plane
	name   string
	uplink uplink
	// flags are further flags for its registration.
	flags []string
}

// startFirewalledMember starts a member in a network.
func (w *world) startFirewalledMember(t *testing.T, name string, up uplink, where localkube.Option) *firewalledMember {
	t.Helper()
	inner := *w
	inner.t = t
	plane := localkube.ForTest(t, localkube.Named(name), localkube.WithExec(join.DefaultAgentImage, w.binary("towline-agent")), where)
	return &firewalledMember{world: &inner, plane: plane, name: name, uplink: up}
}

// runLifecycle registers the member, delivers to it, corrects drift, and deregisters it. unreachable checks that the
// hub cannot dial it; it is called before and after.
func (m *firewalledMember) runLifecycle(unreachable func()) {
	m.t.Helper()
	began := time.Now()
	step := func(what string) { m.t.Logf("%s: %s after %.1f s", m.name, what, time.Since(began).Seconds()) }
	unreachable()
	m.register()
	step("registered")
	m.apply(m.hub, fmt.Sprintf(firewalledProfile, m.name, "first"))
	m.awaitText("first")
	step("deployed")
	m.wantDriftCorrected()
	step("drift corrected")
	m.whileUnplugged(func() {
		m.wantDriftCorrected()
		m.apply(m.hub, fmt.Sprintf(firewalledProfile, m.name, "second"))
	})
	step("drift corrected without the hub")
	m.awaitText("second")
	step("second version deployed")
	m.kubectl(m.hub, "label", "sveltoscluster", m.name, "-n", "sites", "site-")
	m.awaitWithdrawn()
	step("withdrawn")
	m.kubectl(m.hub, "label", "sveltoscluster", m.name, "-n", "sites", "site="+m.name)
	m.awaitText("second")
	unreachable()
	m.deregister()
	step("deregistered")
}

func (m *firewalledMember) register() {
	m.t.Helper()
	args := []string{"register", "cluster", "--namespace=sites", "--cluster=" + m.name, "--pullmode", "--labels=site=" + m.name}
	m.apply(m.plane, m.run(m.hub, "sveltosctl", append(args, m.flags...)...))
	m.awaitReady("sites", m.name)
}

// readObject reads the object of the profile.
func (m *firewalledMember) readObject() (*corev1.ConfigMap, error) {
	object := &corev1.ConfigMap{}
	err := m.client(m.plane).Get(m.t.Context(), client.ObjectKey{Namespace: "default", Name: "delivered"}, object)
	return object, err
}

func (m *firewalledMember) awaitText(text string) {
	m.t.Helper()
	m.eventually("the member "+m.name+" has the "+text+" edition", func() error {
		object, err := m.readObject()
		if err == nil && object.Data["text"] != text {
			err = fmt.Errorf("its text is %q", object.Data["text"])
		}
		return err
	})
	m.awaitProvisioned("sites", m.name+"-sveltos-"+m.name)
}

// wantDriftCorrected deletes the delivered object and waits until it exists again.
func (m *firewalledMember) wantDriftCorrected() {
	m.t.Helper()
	before, err := m.readObject()
	if err == nil {
		err = m.client(m.plane).Delete(m.t.Context(), before)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	m.eventually("a deleted object exists again on "+m.name, func() error {
		object, err := m.readObject()
		if err == nil && object.UID == before.UID {
			err = errors.New("the object was not deleted")
		}
		return err
	})
}

// whileUnplugged calls do while the hub's cable is unplugged.
func (m *firewalledMember) whileUnplugged(do func()) {
	m.t.Helper()
	runInNetwork(m.t, m.hub.Network(), "", "ip", "link", "set", m.uplink.device, "down")
	if err := dial(m.t, m.uplink.far, m.hubHost()); err == nil {
		m.t.Errorf("the hub can be dialled from %s while its cable is unplugged", m.name)
	}
	do()
	runInNetwork(m.t, m.hub.Network(), "", "ip", "link", "set", m.uplink.device, "up")
}

func (m *firewalledMember) awaitWithdrawn() {
	m.t.Helper()
	m.eventually("the object is withdrawn from "+m.name, func() error { return wantNoObject(m.readObject()) })
}

// wantNoObject returns an error unless reading an object returned not found.
func wantNoObject(_ any, err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("want not found, got %w", errors.Join(err, errors.New("an answer")))
}

// deregister deregisters the member, and waits until the delivered objects and the agent are deleted.
func (m *firewalledMember) deregister() {
	m.t.Helper()
	out := m.run(m.hub, "sveltosctl", "deregister", "cluster", "--namespace=sites", "--cluster="+m.name)
	if want := "Successfully deregistered cluster sites/" + m.name; !strings.HasPrefix(out, want) {
		m.t.Errorf("deregister printed %q, want it to begin with %q", out, want)
	}
	m.awaitWithdrawn()
	m.eventually("the agent is deleted from "+m.name, func() error {
		member, ctx := m.client(m.plane), m.t.Context()
		return errors.Join(
			wantNoObject(nil, member.Get(ctx, types.NamespacedName{Name: "projectsveltos"}, &corev1.Namespace{})),
			wantNoObject(nil, member.Get(ctx, types.NamespacedName{Name: "sveltos-applier-manager-role"}, &rbacv1.ClusterRole{})),
		)
	})
	if out := m.kubectl(m.hub, "get", "sveltosclusters,serviceaccounts,leases", "-n", "sites", "-o", "name"); strings.Contains(out, "/"+m.name) {
		m.t.Errorf("after %s was deregistered the hub has %q", m.name, out)
	}
}

// address returns the address of the member's API server.
func (m *firewalledMember) address() string { return hostOf(m.t, m.plane) }

// hubHost returns the address of the hub's API server.
func (w *world) hubHost() string { return hostOf(w.t, w.hub) }

func hostOf(t *testing.T, plane *localkube.Plane) string {
	t.Helper()
	address, err := url.Parse(plane.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort(address.Hostname(), address.Port())
}
