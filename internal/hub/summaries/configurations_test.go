package summaries_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
)

// configurationTest runs a writer of ClusterConfigurations and counts its writes.
type configurationTest struct {
	*testing.T
	hub    client.Client
	writer *summaries.Configurations
	writes atomic.Int32
	// failures is the number of writes that still fail.
	failures atomic.Int32
	// creations is the number of creations, of which the first one fails with createErr.
	creations atomic.Int32
	createErr error
}

// runConfigurationTest calls test in a bubble with a fake clock, beside a running writer.
func runConfigurationTest(t *testing.T, test func(c *configurationTest)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &configurationTest{T: t}
		c.hub = fake.NewClientBuilder().WithScheme(kube.Scheme()).WithStatusSubresource(&configv1beta1.ClusterConfiguration{}).
			WithInterceptorFuncs(interceptor.Funcs{
				Create: func(ctx context.Context, hub client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
					if c.creations.Add(1) == 1 && c.createErr != nil {
						return c.createErr
					}
					return hub.Create(ctx, obj, opts...)
				},
				SubResourceUpdate: func(ctx context.Context, hub client.Client, subresource string, obj client.Object, opts ...client.SubResourceUpdateOption) error {
					c.writes.Add(1)
					if c.failures.Add(-1) >= 0 {
						return errors.New("the API server does not answer")
					}
					return hub.SubResource(subresource).Update(ctx, obj, opts...)
				},
			}).Build()
		c.writer = summaries.NewConfigurations(c.hub, c.hub, "")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.writer.Start(ctx) }()
		test(c)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func configurationMember() fleet.Member {
	return fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one"}
}

// set sets one object for a profile, or removes the entry of the profile if object is "".
func (c *configurationTest) set(profile, object string) {
	if object == "" {
		c.setAll(profile)
		return
	}
	c.setAll(profile, object)
}

// setAll sets the objects of a profile.
func (c *configurationTest) setAll(profile string, objects ...string) {
	owner := metav1.OwnerReference{APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: profile, UID: types.UID("uid-of-" + profile)}
	feature := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureResources}
	for _, object := range objects {
		feature.Resources = append(feature.Resources, configv1beta1.DeployedResource{Kind: "ConfigMap", Version: "v1", Namespace: "a", Name: object})
	}
	c.writer.Set(configurationMember(), owner, []configv1beta1.DeployedFeature{feature})
}

// want compares the listed objects by profile; nil means that there must be no ClusterConfiguration.
func (c *configurationTest) want(want map[string]string) {
	c.Helper()
	existing := &configv1beta1.ClusterConfiguration{}
	err := c.hub.Get(c.Context(), summaries.ConfigurationKey(configurationMember()), existing)
	if want == nil {
		if !apierrors.IsNotFound(err) {
			c.Errorf("got error %v, want that the ClusterConfiguration does not exist", err)
		}
		return
	}
	if err != nil {
		c.Fatal(err)
	}
	if len(existing.Status.ClusterProfileResources) != len(want) || len(existing.OwnerReferences) != len(want) {
		c.Errorf("got %d profiles and %d owners, want %d", len(existing.Status.ClusterProfileResources), len(existing.OwnerReferences), len(want))
	}
	for _, profile := range existing.Status.ClusterProfileResources {
		if got := profile.Features[0].Resources[0].Name; got != want[profile.ClusterProfileName] {
			c.Errorf("profile %s: got object %s, want %s", profile.ClusterProfileName, got, want[profile.ClusterProfileName])
		}
	}
}

// TestChangesOfManyProfilesAreFewWrites deploys fifty profiles on one cluster within a second. Their entries would be
// fifty writes of a growing object, and as many conflicts.
func TestChangesOfManyProfilesAreFewWrites(t *testing.T) {
	t.Parallel()
	runConfigurationTest(t, func(c *configurationTest) {
		want := map[string]string{}
		for i := range 50 {
			profile := fmt.Sprintf("profile-%d", i)
			c.set(profile, "cm")
			want[profile] = "cm"
			<-time.After(20 * time.Millisecond)
		}
		<-time.After(5 * time.Second)
		c.want(want)
		if writes := c.writes.Load(); writes > 2 {
			c.Errorf("got %d writes, want the first one and one more", writes)
		}
	})
}

// TestIntervalGrowsWithTheObject changes one object per second, beside others that stay. Writes of many entries are
// rarer, but the first one after a pause is at once, and so are removals.
func TestIntervalGrowsWithTheObject(t *testing.T) {
	t.Parallel()
	for entries, wantWrites := range map[int]int32{1: 24, 100: 24, 200: 12, 1000: 3, 5000: 2} {
		t.Run(fmt.Sprint(entries), func(t *testing.T) {
			t.Parallel()
			runConfigurationTest(t, func(c *configurationTest) {
				var others []string
				for i := range entries - 1 {
					others = append(others, fmt.Sprint(i))
				}
				change := func(object string) { c.setAll("large", append([]string{object}, others...)...) }
				change("before")
				<-time.After(2 * time.Minute)
				c.writes.Store(0)
				for second := range 120 {
					change(fmt.Sprint("change-", second))
					if synctest.Wait(); second == 0 {
						c.want(map[string]string{"large": "change-0"})
					}
					<-time.After(999 * time.Millisecond) // no change is at the time of a later write
				}
				if writes := c.writes.Load(); writes != wantWrites {
					t.Errorf("%d writes in two minutes, want %d", writes, wantWrites)
				}
				change("last")
				c.set("gone", "")
				synctest.Wait()
				c.want(map[string]string{"large": "last"})
			})
		})
	}
}

// TestUnchangedConfigurationIsNoWrite sets entries that exist and removes entries that do not. The next change waits
// for 5 s after a pause, and until the end of the interval otherwise.
func TestUnchangedConfigurationIsNoWrite(t *testing.T) {
	t.Parallel()
	runConfigurationTest(t, func(c *configurationTest) {
		objects := make([]string, 1000)
		for i := range objects {
			objects[i] = fmt.Sprint(i)
		}
		c.setAll("large", objects...)
		<-time.After(time.Minute)
		c.setAll("large", objects...)
		synctest.Wait()
		c.set("web", "cm")
		<-time.After(5 * time.Second)
		synctest.Wait()
		c.want(map[string]string{"large": "0", "web": "cm"})
		c.set("gone", "")
		synctest.Wait()
		c.set("web", "other")
		<-time.After(49 * time.Second)
		c.want(map[string]string{"large": "0", "web": "cm"})
		<-time.After(2 * time.Second)
		c.want(map[string]string{"large": "0", "web": "other"})
	})
}

// TestOneChangeIsWrittenAtOnce changes one profile after a pause.
func TestOneChangeIsWrittenAtOnce(t *testing.T) {
	t.Parallel()
	runConfigurationTest(t, func(c *configurationTest) {
		for _, object := range []string{"first", "second"} {
			c.set("web", object)
			synctest.Wait()
			c.want(map[string]string{"web": object})
			<-time.After(10 * time.Second)
		}
		c.set("web", "second")
		synctest.Wait()
		if writes := c.writes.Load(); writes != 2 {
			c.Errorf("got %d writes, want 2: the last change is none", writes)
		}
		c.set("web", "")
		<-time.After(10 * time.Second)
		c.want(nil)
	})
}

// TestFailedCreationIsRetried has creations that fail with NotFound. They are not retried if the namespace is missing.
func TestFailedCreationIsRetried(t *testing.T) {
	t.Parallel()
	for resource, wantCreations := range map[string]int32{"namespaces": 1, "clusterconfigurations": 2} {
		t.Run(resource, func(t *testing.T) {
			t.Parallel()
			runConfigurationTest(t, func(c *configurationTest) {
				c.createErr = apierrors.NewNotFound(schema.GroupResource{Resource: resource}, "fleet")
				c.set("web", "cm")
				<-time.After(time.Minute)
				if got := c.creations.Load(); got != wantCreations {
					c.Errorf("%d creations, want %d", got, wantCreations)
				}
			})
		})
	}
}

// TestFailedChangeStaysPending fails a write, and sets a newer change before the next attempt.
func TestFailedChangeStaysPending(t *testing.T) {
	t.Parallel()
	runConfigurationTest(t, func(c *configurationTest) {
		c.failures.Store(2)
		c.set("web", "old")
		c.set("db", "cm")
		synctest.Wait()
		c.set("web", "new")
		read, err := c.writer.Read(c.Context(), configurationMember())
		if err != nil || len(read.ClusterProfileResources) != 2 {
			c.Errorf("got %d profiles and error %v, want the pending changes of two profiles", len(read.ClusterProfileResources), err)
		}
		<-time.After(30 * time.Second)
		c.want(map[string]string{"web": "new", "db": "cm"})
	})
}
