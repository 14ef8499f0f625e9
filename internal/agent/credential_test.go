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

	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

func (w *world) lease(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	return lease, w.hubClient.Get(ctx, w.cluster, lease)
}

func TestAgentExchangesTheManifestsTokenFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := w.startHubProxy()
	w.register()
	registration := &corev1.Secret{}
	key := client.ObjectKey{Namespace: w.cluster.Namespace, Name: w.cluster.Name + "-sveltos-registration"}
	if err := w.hubClient.Get(t.Context(), key, registration); err != nil {
		t.Fatal(err)
	}
	// The hub does not answer the first attempts.
	left := 2
	proxy.setDecision(func(*http.Request) outcome {
		if left == 0 {
			return isForwarded
		}
		left--
		return requestLost
	})
	stop := w.startAgent()
	isExchangeReported := func(ctx context.Context) error {
		lease, err := w.lease(ctx)
		if err != nil {
			return err
		}
		if got := lease.Annotations[kube.AnnotationExchanged]; got != string(registration.UID) || lease.Spec.RenewTime == nil {
			return fmt.Errorf("exchanged %q, renewed %v, want uid %s", got, lease.Spec.RenewTime, registration.UID)
		}
		return nil
	}
	w.eventually("the hub knows of the exchange", isExchangeReported)
	seen := proxy.requests()
	exchange := "POST /api/v1/namespaces/" + w.cluster.Namespace + "/serviceaccounts/c1/token"
	if len(seen) < 4 || slices.ContainsFunc(seen[:3], func(request string) bool { return request != exchange }) || proxy.count("/token") != 3 {
		t.Errorf("requests: got %v, want two lost exchanges and one successful exchange first", seen)
	}

	// The next session reports the exchange again to a hub that has lost the report, without another exchange.
	stop()
	lease, err := w.lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The API server can still be storing the last renewal of the stopped agent: the patch has no resourceVersion.
	before := lease.DeepCopy()
	lease.Annotations = nil
	if err := w.hubClient.Patch(t.Context(), lease, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	w.startAgent()
	w.eventually("the hub knows of the exchange again", isExchangeReported)
	if got := proxy.count("/token"); got != 3 {
		t.Errorf("exchanges after a restart: got %d, want 3", got)
	}
}

func TestRejectedAgentIsRepairedInPlace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := w.startHubProxy()
	w.register()
	logged := &logRecorder{}
	_, stop := w.runAgent(logged.intoContext(t), w.member.Config)
	w.deliver(bundleOf("one", "edited", "deleted"), bundle.StateApplied)
	fetched := proxy.count("/configurationbundles/")
	if fetched == 0 {
		t.Fatal("no bundle was fetched")
	}

	// Tokens of the deleted ServiceAccount are not valid for a new one.
	account := &corev1.ServiceAccount{}
	account.Namespace, account.Name = w.cluster.Namespace, w.cluster.Name
	if err := w.hubClient.Delete(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	w.eventually("the agent logs the commands for the repair", func(context.Context) error {
		if len(logged.linesWith(credentials.Repair(w.cluster.Namespace, w.cluster.Name))) == 0 {
			return errors.New("not logged")
		}
		return nil
	})
	w.wantCorrected()
	stop()
	again := &logRecorder{}
	w.runAgent(again.intoContext(t), w.member.Config)
	w.wantCorrected()
	w.eventually("the restarted agent logs the commands for the repair", func(context.Context) error {
		if len(again.linesWith("sveltosctl register cluster --namespace="+w.cluster.Namespace+" --cluster=c1 --pullmode > registration.yaml")) == 0 {
			return errors.New("not logged")
		}
		return nil
	})

	before := w.sveltosCluster().Status.AgentLastReportTime
	w.register()
	w.eventually("the agent sends heartbeats", func(ctx context.Context) error {
		lease, err := w.lease(ctx)
		if err == nil && lease.Spec.RenewTime == nil {
			err = errors.New("no heartbeat")
		}
		return errors.Join(err, again.checkLogged("the cluster was registered again"))
	})
	w.eventually("the agent reports", func(context.Context) error {
		if now := w.sveltosCluster().Status.AgentLastReportTime; now == nil || now.Equal(before) {
			w.patchCluster(`{"metadata":{"labels":{"touched":"yes"}}}`)
			return fmt.Errorf("last report: %v", now)
		}
		return nil
	})
	if got := proxy.count("/configurationbundles/"); got != fetched {
		t.Errorf("bundles fetched: got %d, want only the first %d", got, fetched)
	}
	for _, log := range []*logRecorder{logged, again} {
		if lines := log.linesWith("the hub refuses the agent's credential"); len(lines) != 1 {
			t.Errorf("messages of one outage: got %d, want 1", len(lines))
		}
	}
	w.deliver(bundleOf("two", "edited"), bundle.StateApplied)
}

func TestRejectedAgentSendsAndLogsLittle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := w.startHubProxy()
	w.register()
	logged := &logRecorder{}
	_, stop := w.runAgent(logged.intoContext(t), w.member.Config)
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	proxy.setDecision(func(*http.Request) outcome { return isRejected })
	proxy.server.CloseClientConnections()
	w.eventually("the rejection is logged", func(context.Context) error { return logged.checkLogged("the hub refuses the agent's credential") })
	wantFewErrors := func(log *logRecorder) {
		t.Helper()
		w.letPass(12 * time.Second)
		// The test itself closes connections: requests on them fail with this error.
		lines := slices.DeleteFunc(log.errorLines(), func(line string) bool { return strings.Contains(line, "unexpected EOF") })
		other := slices.DeleteFunc(slices.Clone(lines), func(line string) bool {
			return strings.Contains(line, credentials.Repair(w.cluster.Namespace, w.cluster.Name))
		})
		if len(lines)-len(other) != 1 || len(other) > 1 {
			t.Errorf("errors logged: got %d, want one with the repair and at most one other:\n%s", len(lines), strings.Join(lines, "\n"))
		}
	}
	wantFewErrors(logged)
	stop()
	again := &logRecorder{}
	w.runAgent(again.intoContext(t), w.member.Config)
	before := proxy.count("")
	wantFewErrors(again)
	if requests := proxy.count("") - before; requests > 5 {
		t.Errorf("requests of a rejected agent within seconds: got %d, want at most 5", requests)
	}
	proxy.setDecision(nil)
	w.deliver(bundleOf("two", "a"), bundle.StateApplied)
}

// checkLogged returns an error unless a line contains text.
func (j *logRecorder) checkLogged(text string) error {
	if len(j.linesWith(text)) == 0 {
		return fmt.Errorf("nothing logged with %q", text)
	}
	return nil
}

func TestAgentUsesTheProxyInItsKubeconfig(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	target := strings.TrimPrefix(w.hub.Config.Host, "https://")
	var tunnels atomic.Int32
	proxy := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect || r.Host != "hub.invalid:6443" {
			http.Error(rw, "only the hub is allowed", http.StatusForbidden)
			return
		}
		tunnels.Add(1)
		tunnel(rw, r, target)
	}))
	t.Cleanup(func() {
		proxy.CloseClientConnections()
		proxy.Close()
	})
	// Only the proxy can resolve this host name.
	w.changeKubeconfig = func(config *clientcmdapi.Config) {
		for _, cluster := range config.Clusters {
			cluster.Server, cluster.TLSServerName, cluster.ProxyURL = "https://hub.invalid:6443", "127.0.0.1", proxy.URL
		}
	}
	w.register()
	stop := w.startAgent()
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	w.wantReady()
	// The agent's own credential uses the proxy too.
	stop()
	if tunnels.Load() == 0 {
		t.Fatal("no connection used the proxy")
	}
	tunnels.Store(0)
	w.addFinalizer()
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.deliver(bundleOf("two", "a"), bundle.StateApplied)
	w.deleteCluster()
	w.withdraw(id)
	w.requestRemoval()
	w.wantEnded(ended)
	if tunnels.Load() == 0 {
		t.Error("no connection used the proxy after the exchange")
	}
}

// tunnel connects the client of a CONNECT request with target, until one of them closes the connection.
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
