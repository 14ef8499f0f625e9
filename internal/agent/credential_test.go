package agent_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func (w *world) lease(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	return lease, w.hubClient.Get(ctx, w.cluster, lease)
}

func TestAgentExchangesTheManifestsTokenFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	front := w.stand()
	w.register()
	registration := &corev1.Secret{}
	key := client.ObjectKey{Namespace: w.cluster.Namespace, Name: w.cluster.Name + "-sveltos-registration"}
	if err := w.hubClient.Get(t.Context(), key, registration); err != nil {
		t.Fatal(err)
	}
	// The hub does not answer the first attempts.
	lose := 2
	front.losing(func(*http.Request) fate {
		if lose == 0 {
			return arrives
		}
		lose--
		return lostBefore
	})
	stop := w.startAgent()
	told := func(ctx context.Context) error {
		lease, err := w.lease(ctx)
		if err != nil {
			return err
		}
		if got := lease.Annotations[kube.AnnotationExchanged]; got != string(registration.UID) || lease.Spec.RenewTime == nil {
			return fmt.Errorf("exchanged %q, renewed %v, want uid %s", got, lease.Spec.RenewTime, registration.UID)
		}
		return nil
	}
	w.eventually("the hub knows of the exchange", told)
	seen := front.requests()
	exchange := "POST /api/v1/namespaces/edge/serviceaccounts/c1/token"
	if len(seen) < 4 || slices.ContainsFunc(seen[:3], func(request string) bool { return request != exchange }) || front.count("/token") != 3 {
		t.Errorf("requests: got %v, want two lost exchanges and one that arrives first", seen)
	}

	// A hub that lost it is told again by the next session, which exchanges nothing.
	stop()
	lease, err := w.lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lease.Annotations = nil
	if err := w.hubClient.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	w.startAgent()
	w.eventually("the hub knows of the exchange again", told)
	if got := front.count("/token"); got != 3 {
		t.Errorf("exchanges after a restart: got %d, want 3", got)
	}
}

func TestRefusedAgentSaysWhatToRunAndIsRepairedInPlace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	front := w.stand()
	w.register()
	logged := &journal{}
	_, stop := w.runAgent(logged.context(t), w.member.Config)
	w.deliver(bundleOf("one", "edited", "deleted"), bundle.StateApplied)
	fetched := front.count("/configurationbundles/")
	if fetched == 0 {
		t.Fatal("no bundle was fetched")
	}

	// A ServiceAccount made anew knows none of the tokens of the old one.
	account := &corev1.ServiceAccount{}
	account.Namespace, account.Name = w.cluster.Namespace, w.cluster.Name
	if err := w.hubClient.Delete(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	w.eventually("the agent says what to run", func(context.Context) error {
		if len(logged.with(join.Repair(w.cluster.Namespace, w.cluster.Name))) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	w.breakAndWantHealed()
	stop()
	again := &journal{}
	w.runAgent(again.context(t), w.member.Config)
	w.breakAndWantHealed()
	w.eventually("the restarted agent says what to run", func(context.Context) error {
		if len(again.with("sveltosctl register cluster --namespace=edge --cluster=c1 --pullmode > registration.yaml")) == 0 {
			return errors.New("it does not")
		}
		return nil
	})

	before := w.sveltosCluster().Status.AgentLastReportTime
	w.register()
	w.eventually("the agent is back", func(ctx context.Context) error {
		lease, err := w.lease(ctx)
		if err == nil && lease.Spec.RenewTime == nil {
			err = errors.New("no heartbeat")
		}
		return errors.Join(err, again.missing("the cluster was registered again"))
	})
	w.eventually("the agent reports", func(context.Context) error {
		if now := w.sveltosCluster().Status.AgentLastReportTime; now == nil || now.Equal(before) {
			w.patchCluster(`{"metadata":{"labels":{"touched":"yes"}}}`)
			return fmt.Errorf("last report: %v", now)
		}
		return nil
	})
	if got := front.count("/configurationbundles/"); got != fetched {
		t.Errorf("bundles fetched: got %d, want no more than the first %d", got, fetched)
	}
	for _, log := range []*journal{logged, again} {
		if said := log.with("the hub refuses the agent's credential"); len(said) != 1 {
			t.Errorf("messages of one outage: got %d, want 1", len(said))
		}
	}
	w.deliver(bundleOf("two", "edited"), bundle.StateApplied)
}

func TestRefusedAgentIsQuiet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	front := w.stand()
	w.register()
	logged := &journal{}
	_, stop := w.runAgent(logged.context(t), w.member.Config)
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	front.losing(func(*http.Request) fate { return refused })
	front.server.CloseClientConnections()
	w.eventually("the agent knows", func(context.Context) error { return logged.missing("the hub refuses the agent's credential") })
	quiet := func(log *journal) {
		t.Helper()
		// Nothing can be waited for when nothing is to be said.
		while, cancel := context.WithTimeout(t.Context(), 12*time.Second)
		defer cancel()
		<-while.Done()
		said := log.errors()
		other := slices.DeleteFunc(slices.Clone(said), func(line string) bool { return strings.Contains(line, join.Repair("edge", "c1")) })
		if len(said)-len(other) != 1 || len(other) > 1 {
			t.Errorf("errors logged: got %d, want that with the repair and no more than another one:\n%s", len(said), strings.Join(said, "\n"))
		}
	}
	quiet(logged)
	stop()
	again := &journal{}
	w.runAgent(again.context(t), w.member.Config)
	before := front.count("")
	quiet(again)
	if asked := front.count("") - before; asked > 5 {
		t.Errorf("requests of a refused agent within seconds: got %d", asked)
	}
	front.losing(nil)
	w.deliver(bundleOf("two", "a"), bundle.StateApplied)
}

// missing returns an error unless some line holds text.
func (j *journal) missing(text string) error {
	if len(j.with(text)) == 0 {
		return fmt.Errorf("nothing logged with %q", text)
	}
	return nil
}

func TestAgentReachesTheHubByItsProxyOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	target := strings.TrimPrefix(w.hub.Config.Host, "https://")
	var tunnels atomic.Int32
	proxy := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect || r.Host != "hub.invalid:6443" {
			http.Error(rw, "only to the hub", http.StatusForbidden)
			return
		}
		tunnels.Add(1)
		tunnel(rw, r, target)
	}))
	t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
	})
	// There is no way to a host of that name but the proxy's.
	w.way = func(config *clientcmdapi.Config) {
		for _, cluster := range config.Clusters {
			cluster.Server, cluster.TLSServerName, cluster.ProxyURL = "https://hub.invalid:6443", "127.0.0.1", proxy.URL
		}
	}
	w.register()
	stop := w.startAgent()
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	w.connected()
	// The credential that the agent requested itself leads there too.
	stop()
	if tunnels.Load() == 0 {
		t.Fatal("nothing went through the proxy")
	}
	tunnels.Store(0)
	w.hold()
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.deliver(bundleOf("two", "a"), bundle.StateApplied)
	w.deleteCluster()
	w.withdraw(id)
	w.order()
	w.wantEnd(ended)
	if tunnels.Load() == 0 {
		t.Error("nothing went through the proxy after the exchange")
	}
}

// tunnel connects the client of a CONNECT request with target, until one of them is done.
func tunnel(rw http.ResponseWriter, r *http.Request, target string) {
	hub, err := (&net.Dialer{}).DialContext(r.Context(), "tcp", target)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = hub.Close() }()
	rw.WriteHeader(http.StatusOK)
	agent, buffered, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = agent.Close() }()
	go func() {
		_, _ = io.Copy(hub, buffered)
		_ = hub.Close()
	}()
	_, _ = io.Copy(agent, hub)
}
