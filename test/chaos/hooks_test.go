package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	typedbatchv1 "k8s.io/client-go/kubernetes/typed/batch/v1"

	"github.com/towline/towline/internal/localkube"
)

// deleteHook is the hook of the chart before an uninstallation. onceHook with the edition is the name of the hook whose
// Job is deleted only if the hook fails.
const (
	deleteHook = "delete"
	onceHook   = "once-"
)

// hookLog records every Job that was created for a hook of the chart.
type hookLog struct {
	jobs typedbatchv1.JobInterface
	mu   sync.Mutex // guards the fields below
	// created has the UIDs of the Jobs by hook and edition, "pre 3".
	created map[string][]types.UID
	// version is the resource version up to which the log is complete.
	version string
	// ignored are the Jobs from before the last registration.
	ignored map[types.UID]bool
}

// watchHooks watches the Jobs of a member until the test ends, across restarts of its API server.
func watchHooks(t *testing.T, plane *localkube.Plane) *hookLog {
	t.Helper()
	jobs := kubernetes.NewForConfigOrDie(plane.Config).BatchV1().Jobs(chartProfile)
	list, err := jobs.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := &hookLog{jobs: jobs, created: map[string][]types.UID{}, version: list.ResourceVersion, ignored: map[types.UID]bool{}}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var reader sync.WaitGroup
	t.Cleanup(func() { cancel(); reader.Wait() })
	reader.Go(func() {
		for ctx.Err() == nil {
			events, err := jobs.Watch(ctx, metav1.ListOptions{ResourceVersion: l.resourceVersion(), AllowWatchBookmarks: true})
			if err == nil {
				for event := range events.ResultChan() {
					l.add(event)
				}
			}
			// An API server that was restarted has no earlier events.
			if list, err := jobs.List(ctx, metav1.ListOptions{}); err == nil {
				l.addList(list)
			}
			select {
			case <-ctx.Done():
			case <-time.After(pollInterval):
			}
		}
	})
	return l
}

func (l *hookLog) resourceVersion() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.version
}

func (l *hookLog) add(event watch.Event) {
	job, ok := event.Object.(*batchv1.Job)
	if !ok {
		return // an error: the watch ends
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.version = job.ResourceVersion
	if event.Type != watch.Bookmark {
		l.record(job)
	}
}

func (l *hookLog) addList(list *batchv1.JobList) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.version = list.ResourceVersion
	for i := range list.Items {
		l.record(&list.Items[i])
	}
}

// record records a Job. The caller holds mu.
func (l *hookLog) record(job *batchv1.Job) {
	if l.ignored[job.UID] {
		return
	}
	key := strings.TrimSuffix(job.Name, job.Annotations["edition"]) + " " + job.Annotations["edition"]
	if !slices.Contains(l.created[key], job.UID) {
		l.created[key] = append(l.created[key], job.UID)
	}
}

// reset deletes the records: a new registration installs the chart again.
func (l *hookLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, uids := range l.created {
		for _, uid := range uids {
			l.ignored[uid] = true
		}
	}
	l.created = map[string][]types.UID{}
}

// checkRepeated returns an error if a hook was created more than once for an edition, or the hook of the uninstallation
// more than once at all.
func (l *hookLog) checkRepeated() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, uids := range l.created {
		if len(uids) > 1 {
			return fmt.Errorf("hook %s ran %d times", key, len(uids))
		}
	}
	if count := l.count(deleteHook); count > 1 {
		return fmt.Errorf("hook %s ran %d times", deleteHook, count)
	}
	return nil
}

// count returns the number of times that a hook was created, in all editions. The caller holds mu.
func (l *hookLog) count(hook string) int {
	count := 0
	for key, uids := range l.created {
		if strings.HasPrefix(key, hook+" ") {
			count += len(uids)
		}
	}
	return count
}

// checkKept returns an error if the Job of onceHook for the current edition does not exist: then a second run could not
// fail. Jobs of revisions that newer ones have replaced are deleted.
func (l *hookLog) checkKept(edition int, jobs []batchv1.Job) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, uid := range l.created[fmt.Sprintf("%s %d", onceHook, edition)] {
		if !slices.ContainsFunc(jobs, func(job batchv1.Job) bool { return job.UID == uid }) {
			return fmt.Errorf("the Job of hook %s for edition %d was deleted", onceHook, edition)
		}
	}
	return nil
}

// TestCheckKeptFindsRecreatedJob checks that checkKept reports a Job that was created again, and accepts a Job that
// exists.
func TestCheckKeptFindsRecreatedJob(t *testing.T) {
	t.Parallel()
	job := func(uid types.UID) batchv1.Job {
		return batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: onceHook + "3", UID: uid, Annotations: map[string]string{"edition": "3"}}}
	}
	l := &hookLog{created: map[string][]types.UID{}}
	l.addList(&batchv1.JobList{Items: []batchv1.Job{job("a")}})
	if err := l.checkKept(3, []batchv1.Job{job("a")}); err != nil {
		t.Error(err)
	}
	if err := l.checkKept(3, []batchv1.Job{job("b")}); err == nil {
		t.Error("a Job that was deleted is accepted")
	}
}

// checkDeployed returns an error unless the hooks of the current edition ran, and deleteHook did not.
func (l *hookLog) checkDeployed(edition int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, hook := range []string{"pre", "post", onceHook} {
		if key := fmt.Sprintf("%s %d", hook, edition); len(l.created[key]) != 1 {
			return fmt.Errorf("hook %s ran %d times, want once", key, len(l.created[key]))
		}
	}
	if count := l.count(deleteHook); count != 0 {
		return fmt.Errorf("hook %s of a release that is deployed ran %d times", deleteHook, count)
	}
	return nil
}

// checkUninstalled returns an error unless the hook of the uninstallation ran. It need not run for a release that was
// not deployed; wasDeployed is true if the fleet had settled with the release.
func (l *hookLog) checkUninstalled(wasDeployed bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if count := l.count(deleteHook); wasDeployed && count != 1 {
		return fmt.Errorf("hook %s ran %d times, want once", deleteHook, count)
	}
	return nil
}
