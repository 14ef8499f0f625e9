package hub_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
)

// untouchedTime is the time during which a hub of another shard must not change the objects. The hub of the cluster's
// shard corrects drift much sooner.
const untouchedTime = 3 * time.Second

// localWorld is a world with two shards, and a profile with content for the cluster of the hub.
type localWorld struct {
	*world
	profile *configv1beta1.ClusterProfile
	content *corev1.ConfigMap
}

func newLocalWorld(t *testing.T) *localWorld {
	t.Helper()
	w := &localWorld{world: newPrivateWorld(t)}
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	w.content = w.createConfigMap("manifests", manifest("on-hub"))
	return w
}

// hub starts the hub of a shard.
func (w *localWorld) hub(shard string) (stop func()) {
	w.Helper()
	return w.start(w.plane.Config, hub.Options{ShardKey: shard, LeaderElection: true, Transports: newShardTransport().transports()})
}

// deploy creates the profile, whose drift is corrected.
func (w *localWorld) deploy(member string) {
	w.Helper()
	w.profile = w.createProfile(func(s *configv1beta1.ProfileSpec) {
		s.SyncMode = configv1beta1.SyncModeContinuousWithDriftDetection
		s.PolicyRefs[0].DeploymentType = libv1beta1.DeploymentTypeLocal
	})
	w.wantProvisioned(w.profile, member)
}

func (w *localWorld) move(cluster *libv1beta1.SveltosCluster, shard string) {
	w.Helper()
	update(w.world, cluster, func(c *libv1beta1.SveltosCluster) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, libv1beta1.ShardAnnotation, shard)
	})
}

func (w *localWorld) object(name string) (*corev1.ConfigMap, error) {
	cm := &corev1.ConfigMap{}
	err := w.Get(w.Context(), client.ObjectKey{Namespace: "default", Name: name}, cm)
	return cm, err
}

func (w *localWorld) deleteObject(name string) {
	w.Helper()
	cm, err := w.object(name)
	w.must(err)
	w.must(w.Delete(w.Context(), cm))
}

func (w *localWorld) wantObject(what, name string) {
	w.Helper()
	w.eventually(what, func() error {
		_, err := w.object(name)
		return err
	})
}

func (w *localWorld) wantWithdrawn(what, name string) {
	w.Helper()
	w.eventually(what, func() error {
		if _, err := w.object(name); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the object still exists: %w", err)
		}
		return checkEqual(0, w.countRecords())
	})
}

// wantUntouched waits for untouchedTime, and fails if the object exists meanwhile.
func (w *localWorld) wantUntouched(what, name string) {
	w.Helper()
	err := wait.PollUntilContextTimeout(w.Context(), 50*time.Millisecond, untouchedTime, true, func(context.Context) (bool, error) {
		if _, err := w.object(name); !apierrors.IsNotFound(err) {
			return false, fmt.Errorf("the object exists: %w", err)
		}
		return false, nil
	})
	if !wait.Interrupted(err) {
		w.Fatalf("%s: %v", what, err)
	}
}

// countRecords returns the number of inventory records on the hub.
func (w *localWorld) countRecords() int {
	w.Helper()
	var list corev1.SecretList
	w.must(w.List(w.Context(), &list, client.InNamespace("projectsveltos"), client.MatchingLabels{"towline.dev/record": "head"}))
	return len(list.Items)
}

// changeObject changes the name of the deployed object, and waits until the hub of the cluster's shard has deployed it.
func (w *localWorld) changeObject(what, name string) {
	w.Helper()
	update(w.world, w.content, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest(name) })
	w.wantObject(what, name)
}

// TestLocalContentMovesWithItsCluster moves a cluster between two shards. Only the hub of the cluster's shard corrects
// and withdraws its objects.
func TestLocalContentMovesWithItsCluster(t *testing.T) {
	w := newLocalWorld(t)
	stopDefault, stopK := w.hub(""), w.hub("k")
	one := w.createReadyMember("one", w.prodLabels())
	w.deploy("one")
	w.deleteObject("on-hub")
	w.wantObject("the default hub corrects", "on-hub")

	w.move(one, "k")
	w.changeObject("the hub of k deploys", "moved")
	w.deleteObject("moved")
	w.wantObject("the hub of k corrects", "moved")
	stopK()
	w.deleteObject("moved")
	w.wantUntouched("the default hub has served the cluster before", "moved")
	stopDefault()
	stopDefault = w.hub("")
	w.wantUntouched("the default hub was started again", "moved")
	stopK = w.hub("k")
	w.wantObject("the hub of k corrects after a restart", "moved")

	w.move(one, "")
	w.changeObject("the default hub deploys again", "back")
	w.wantProvisioned(w.profile, "one")
	w.eventually("one record", func() error { return checkEqual(1, w.countRecords()) })
	stopDefault()
	w.deleteObject("back")
	w.wantUntouched("the hub of k has served the cluster before", "back")

	w.move(one, "k")
	w.wantObject("the hub of k corrects again", "back")
	w.must(w.Delete(t.Context(), w.profile))
	w.hub("") // the default hub deletes the summary
	w.wantNoSummary(w.profile, "one")
	w.wantWithdrawn("the hub of k withdraws", "back")
	w.wantUntouched("no hub creates it again", "back")
	stopK()
}

// TestLocalContentOfALostClusterOfAShardIsWithdrawn removes a cluster object without a deregistration.
func TestLocalContentOfALostClusterOfAShardIsWithdrawn(t *testing.T) {
	for name, isRunning := range map[string]bool{"its hub runs": true, "its hub does not run": false} {
		t.Run(name, func(t *testing.T) {
			w := newLocalWorld(t)
			w.hub("")
			stopK := w.hub("k")
			one := w.createShardMember("k", "one")
			w.deploy("one")
			if !isRunning {
				stopK()
			}
			w.eventually("the cluster is deleted", func() error {
				noFinalizers := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
				if err := w.Patch(t.Context(), one, noFinalizers); err != nil {
					return client.IgnoreNotFound(err)
				}
				if err := w.Delete(t.Context(), one); err != nil {
					return client.IgnoreNotFound(err)
				}
				return errors.New("the summary still exists")
			})
			w.wantNoSummary(w.profile, "one")
			w.wantWithdrawn("the default hub withdraws", "on-hub")
		})
	}
}
