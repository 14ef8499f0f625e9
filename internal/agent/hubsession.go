package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// credentialCheckInterval is the time after which a waiting session checks again whether the cluster was registered
	// again. It is also the time between two reads of a Lease that another member holds.
	credentialCheckInterval = 5 * time.Second
	// rejectedRetryInterval is the time between two attempts with a credential that the hub rejects. An API server that
	// starts can reject a valid one.
	rejectedRetryInterval = session.MaxRetryDelay
	// hubQPS is the maximal number of requests per second of one agent: a big delivery needs some dozens, and the hub
	// has many agents.
	hubQPS = 50
)

// hubSession is the work of an agent for the hub with one credential.
type hubSession struct {
	*agent
	credential *credentials.Credential
	hubClient  client.WithWatch
	leaseKey   client.ObjectKey
	// memberID is the UID of the member's namespace kube-system. It differs even if two members use one credential.
	memberID types.UID
	// reportedExchange is the value of credential.ExchangedSecretUID that this session has written to the Lease.
	reportedExchange types.UID
	// heartbeatRequested holds one signal to send a heartbeat now.
	heartbeatRequested chan struct{}
	// reportedUnrequested is the value of kube.AnnotationUnrequested in the Lease, as the hub last returned it; nil before
	// the first heartbeat. The value lists the bundles on the member that have no group on the hub.
	reportedUnrequested *string
	// storedPaused is the paused state that this session has stored on the member, nil before the first time.
	storedPaused *bool
}

// connect runs sessions. It starts a new one at once after a new registration or a takeover. After any other end it
// returns the error, so that its BackoffLoop delays the next call or ends.
func (a *agent) connect(ctx context.Context) error {
	for {
		err := a.runSession(ctx)
		switch {
		case errors.Is(err, credentials.ErrSuperseded), errors.Is(err, errTakenOver):
			log.FromContext(ctx).Info("reconnecting to the hub", logkeys.Reason, err.Error())
		default:
			return err
		}
	}
}

// runSession continues an uninstallation if one has begun. Otherwise it runs one session, and uninstalls the agent if
// the hub requests that.
func (a *agent) runSession(ctx context.Context) error {
	state, err := a.uninstaller.resumeOrRollBack(ctx)
	if err != nil {
		return err
	}
	if state != nil {
		return a.finishUninstall(ctx, state)
	}
	if err := a.logOtherRegistrations(ctx); err != nil {
		return err
	}
	s := &hubSession{agent: a, heartbeatRequested: make(chan struct{}, 1)}
	if s.credential, err = a.openCredential(ctx); err != nil {
		return err
	}
	// The token in the manifest is used only once, because others may have a copy of the manifest. After the first
	// exchange this does nothing.
	if err := s.credential.Exchange(ctx); err != nil {
		return err
	}
	if s.hubClient, err = newHubClient(s.credential.Config()); err != nil {
		return err
	}
	if s.memberID, err = a.readMemberID(ctx); err != nil {
		return err
	}
	s.leaseKey = client.ObjectKey{Namespace: s.credential.DeliveryNamespace(), Name: a.opts.Name}
	if err := s.claimLeaseWithRetry(ctx); err != nil {
		return err
	}
	err = s.run(a.rejectedLog.WithFilteredLog(ctx))
	if errors.Is(err, session.ErrUninstallRequested) {
		return a.uninstall(ctx, s.hubClient)
	}
	return err
}

func (a *agent) openCredential(ctx context.Context) (*credentials.Credential, error) {
	return credentials.Open(ctx, credentials.Options{
		Secrets: a.secrets, Secret: a.opts.KubeconfigSecret, Namespace: a.opts.Namespace, Name: a.opts.Name,
		Life: a.opts.TokenLife, Clock: a.opts.Clock,
	})
}

// newHubClient returns a client for the kinds that an agent uses. It needs no discovery requests.
func newHubClient(config *rest.Config) (client.WithWatch, error) {
	mapper := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []string{libv1beta1.SveltosClusterKind, libv1beta1.ConfigurationGroupKind, libv1beta1.ConfigurationBundleKind} {
		mapper.Add(libv1beta1.GroupVersion.WithKind(kind), meta.RESTScopeNamespace)
	}
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Secret"), meta.RESTScopeNamespace)
	config = deliver.LimitResponses(config)
	config.QPS, config.Burst = hubQPS, 2*hubQPS
	hub, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme(), Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("create a client for the hub: %w", err)
	}
	return hub, nil
}

// readMemberID returns the ID of the member: the UID of its namespace kube-system.
func (a *agent) readMemberID(ctx context.Context) (types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	namespace, err := a.namespaces.Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read namespace %s of the cluster: %w", metav1.NamespaceSystem, err)
	}
	return namespace.UID, nil
}

// claimLeaseWithRetry claims the Lease. It retries while the hub rejects the credential or another member uses the
// registration. It returns credentials.ErrSuperseded if the cluster is registered again meanwhile.
func (s *hubSession) claimLeaseWithRetry(ctx context.Context) error {
	for {
		err := s.claimLease(ctx)
		if err == nil {
			s.rejectedLog.Reset()
			return nil
		}
		s.metrics.RecordHeartbeat(err)
		pause := rejectedRetryInterval
		if errors.Is(err, errDuplicateRegistration) {
			s.rejectedLog.Reset()
			s.duplicate.log(ctx, s.clusterKey())
			pause = credentialCheckInterval
		} else if !s.rejectedLog.LogIfRejected(ctx, err) {
			return err
		}
		if err := s.waitForRetry(ctx, pause); err != nil {
			return err
		}
	}
}

// waitForRetry waits for duration. If ctx ends or the cluster is registered again, it returns an error earlier.
func (s *hubSession) waitForRetry(ctx context.Context, duration time.Duration) error {
	for end := s.opts.Clock.Now().Add(duration); s.opts.Clock.Now().Before(end); {
		s.metrics.Watchdog.Reset()
		if !session.Sleep(ctx, s.opts.Clock, credentialCheckInterval) {
			return ctx.Err()
		}
		if s.credential.IsSuperseded(ctx) {
			return credentials.ErrSuperseded
		}
	}
	return nil
}

// run runs the tasks of the session in parallel. It returns session.ErrUninstallRequested if the hub requests the
// removal of the agent, errTakenOver if another member has claimed the Lease, and otherwise the result of
// credentials.Credential.Run: nil if ctx ends, or an error if the credential is superseded or rejected.
func (s *hubSession) run(ctx context.Context) error {
	source := deliver.NewAgentSource(s.hubClient, s.credential.DeliveryNamespace(), s.opts.Name)
	s.source.Store(source)
	defer s.source.Store(nil)
	worker := &session.Worker{Source: source, Engine: s.engine, Gate: s.gate, OnKindsChanged: s.facts.requestRead, OnConverged: s.metrics.RecordConverge,
		// The heartbeat reports the unrequested bundles, which have changed.
		OnWithdrawn: func() { session.Signal(s.heartbeatRequested) },
	}

	server := s.credential.Config().Host
	log.FromContext(ctx).Info("connected to the hub", "server", server)
	ctx, cancel := context.WithCancelCause(ctx)
	defer func() { log.FromContext(ctx).Info("disconnected from the hub", "server", server) }()
	var goroutines sync.WaitGroup
	defer goroutines.Wait()
	defer cancel(nil)
	goroutines.Go(func() {
		if err := s.runHeartbeats(ctx); err != nil {
			cancel(err)
		}
	})
	goroutines.Go(func() { s.runReports(ctx) })
	goroutines.Go(func() {
		session.ClusterWatcher[*libv1beta1.SveltosCluster]{
			Key: s.clusterKey(), Example: &libv1beta1.SveltosCluster{}, NewList: func() client.ObjectList { return &libv1beta1.SveltosClusterList{} },
			OnChange: func(ctx context.Context, cluster *libv1beta1.SveltosCluster) {
				if session.IsUninstallRequested(cluster) {
					cancel(session.ErrUninstallRequested)
					return
				}
				s.onClusterChange(ctx, cluster)
			},
		}.Run(ctx, s.hubClient)
	})
	goroutines.Go(func() {
		// Run returns only when ctx ends.
		_ = source.Run(ctx, s.opts.Workers, worker.Handle)
	})
	err := s.credential.Run(ctx)
	if cause := context.Cause(ctx); errors.Is(cause, session.ErrUninstallRequested) || errors.Is(cause, errTakenOver) {
		return cause
	}
	return err
}

// onClusterChange handles a new version of the SveltosCluster.
func (s *hubSession) onClusterChange(ctx context.Context, cluster *libv1beta1.SveltosCluster) {
	s.checks.setCluster(cluster)
	if s.needsReport(cluster) {
		s.facts.requestReport()
	}
	// The bundles of a cluster that is being deregistered are removed even if the cluster is paused.
	s.setPaused(ctx, cluster.Spec.Paused && cluster.DeletionTimestamp == nil)
}

// setPaused closes the gate if the cluster is paused, and opens it otherwise. It stores the paused state on the member
// for a restart. If the write fails, the next event of the SveltosCluster repeats it.
func (s *hubSession) setPaused(ctx context.Context, paused bool) {
	if s.gate.SetClosed(paused) {
		log.FromContext(ctx).Info("the cluster was paused or unpaused", "paused", paused)
	}
	if s.storedPaused != nil && *s.storedPaused == paused {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	patch := `{"metadata":{"annotations":{"` + pausedAnnotation + `":null}}}`
	if paused {
		patch = `{"metadata":{"annotations":{"` + pausedAnnotation + `":"true"}}}`
	}
	_, err := s.secrets.Patch(ctx, s.opts.KubeconfigSecret, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil {
		log.FromContext(ctx).Info("cannot store on the member whether the cluster is paused", logkeys.Reason, err.Error())
		return
	}
	s.storedPaused = &paused
}
