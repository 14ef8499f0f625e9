package stories

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/localkube"
)

const statusContent = `
apiVersion: v1
kind: ConfigMap
metadata:
  namespace: default
  name: with-status
  annotations: {projectsveltos.io/subresources: status}
data:
  objects.yaml: |
    apiVersion: v1
    kind: Service
    metadata: {namespace: default, name: with-status}
    spec: {type: LoadBalancer, ports: [{port: 80}]}
    status: {loadBalancer: {ingress: [{ip: %s}]}}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: with-status}
spec:
  clusterSelector: {matchLabels: {env: status}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: with-status}
`

// TestSubresources deploys the status of an object in a ConfigMap with the annotation for it, and changes it.
func TestSubresources(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := []*localkube.Plane{w.pullMember("fleet-pulled", "pulled", "env=status"), w.pushMember("fleet-pushed", "pushed", "env=status")}
	for _, ip := range []string{"10.0.0.1", "10.0.0.2"} {
		w.apply(w.hub, fmt.Sprintf(statusContent, ip))
		for _, member := range members {
			w.eventually("the status has "+ip, func() error {
				found := &corev1.Service{}
				err := w.client(member).Get(w.t.Context(), client.ObjectKey{Namespace: "default", Name: "with-status"}, found)
				if ingress := found.Status.LoadBalancer.Ingress; err == nil && (len(ingress) != 1 || ingress[0].IP != ip) {
					err = fmt.Errorf("the status is %+v", found.Status)
				}
				return err
			})
		}
	}
}
