package stories

import "github.com/towline/towline/examples"

// charts stand in for the charts of the seeds: they have the properties that make the originals hard to deploy.
func charts() []examples.Chart {
	return []examples.Chart{
		{},
		{Name: "kyverno", Version: "3.3.3", Files: kyvernoFiles()},
		{Name: "kyverno", Version: "3.5.1", Files: kyvernoFiles()},
		{Name: "tetragon", Version: "1.5.0", Files: tetragonFiles()},
	}
}

// kyvernoFiles resemble Kyverno's chart: its CustomResourceDefinitions are templates, its ClusterRoles are aggregated,
// a ConfigMap stays after the uninstallation, and hooks prepare, migrate resources, scale down and test.
func kyvernoFiles() map[string]string {
	return map[string]string{
		"templates/crds.yaml":               kyvernoCRD,
		"templates/rbac.yaml":               kyvernoRoles,
		"templates/config.yaml":             kyvernoConfig,
		"templates/webhooks.yaml":           kyvernoWebhooks,
		"templates/hooks/pre-install.yaml":  kyvernoPreInstall,
		"templates/hooks/post-upgrade.yaml": kyvernoPostUpgrade,
		"templates/hooks/pre-delete.yaml":   kyvernoPreDelete,
		"templates/tests/admission.yaml":    kyvernoTest,
	}
}

const kyvernoCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: clusterpolicies.kyverno.io
  labels: {app.kubernetes.io/component: crds, app.kubernetes.io/part-of: {{ .Release.Name }}-crds}
  annotations: {controller-gen.kubebuilder.io/version: v0.17.3}
spec:
  group: kyverno.io
  names: {kind: ClusterPolicy, listKind: ClusterPolicyList, plural: clusterpolicies, singular: clusterpolicy, shortNames: [cpol], categories: [kyverno]}
  scope: Cluster
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec: {type: object, x-kubernetes-preserve-unknown-fields: true}
          status: {type: object, x-kubernetes-preserve-unknown-fields: true}
    subresources: {status: {}}
`

const kyvernoRoles = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: {{ .Release.Name }}-admission-controller, namespace: {{ .Release.Namespace }}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "{{ .Release.Name }}:admission-controller"}
aggregationRule:
  clusterRoleSelectors:
  - matchLabels: {rbac.kyverno.io/aggregate-to-admission-controller: "true"}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: "{{ .Release.Name }}:admission-controller:core"
  labels: {rbac.kyverno.io/aggregate-to-admission-controller: "true"}
rules:
- {apiGroups: [admissionregistration.k8s.io], resources: [mutatingwebhookconfigurations, validatingwebhookconfigurations], verbs: [get, list, watch, create, update, delete]}
- {apiGroups: [kyverno.io], resources: [clusterpolicies, clusterpolicies/status], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: "{{ .Release.Name }}:rbac:admin:policies"
  labels: {rbac.authorization.k8s.io/aggregate-to-admin: "true"}
rules:
- {apiGroups: [kyverno.io], resources: [clusterpolicies], verbs: [create, delete, get, list, patch, update, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "{{ .Release.Name }}:admission-controller"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "{{ .Release.Name }}:admission-controller"}
subjects:
- {kind: ServiceAccount, name: {{ .Release.Name }}-admission-controller, namespace: {{ .Release.Namespace }}}
`

const kyvernoConfig = `
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .Release.Name }}-config
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/resource-policy: keep}
data:
  enableDefaultRegistryMutation: "true"
  resourceFilters: "[Event,*,*] [*/*,kube-system,*] [Node,*,*]"
  webhooks: {{ dict "namespaceSelector" (dict "matchExpressions" list) | toJson | quote }}
`

const kyvernoWebhooks = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata:
  name: {{ .Release.Name }}-policy
webhooks:
- name: validate-policy.kyverno.svc
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Ignore
  clientConfig: {service: {name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}, path: /policyvalidate}}
  rules:
  - {apiGroups: [kyverno.io], apiVersions: ["*"], operations: [CREATE, UPDATE], resources: [clusterpolicies]}
`

const kyvernoPreInstall = `
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}-prepare
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/hook: "pre-install,pre-upgrade", helm.sh/hook-delete-policy: "before-hook-creation,hook-succeeded"}
spec:
  backoffLimit: 2
  template:
    spec:
      restartPolicy: Never
      containers:
      - {name: kubectl, image: docker.io/bitnami/kubectl:1.32, args: [version]}
`

const kyvernoPostUpgrade = `
{{- $policies := "before-hook-creation,hook-succeeded,hook-failed" }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .Release.Name }}-migrate-resources
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/hook: post-upgrade, helm.sh/hook-weight: "100", helm.sh/hook-delete-policy: "{{ $policies }}"}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: "{{ .Release.Name }}:migrate-resources"
  annotations: {helm.sh/hook: post-upgrade, helm.sh/hook-weight: "100", helm.sh/hook-delete-policy: "{{ $policies }}"}
rules:
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], verbs: [get]}
- {apiGroups: [kyverno.io], resources: ["*"], verbs: [get, list, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: "{{ .Release.Name }}:migrate-resources"
  annotations: {helm.sh/hook: post-upgrade, helm.sh/hook-weight: "100", helm.sh/hook-delete-policy: "{{ $policies }}"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "{{ .Release.Name }}:migrate-resources"}
subjects:
- {kind: ServiceAccount, name: {{ .Release.Name }}-migrate-resources, namespace: {{ .Release.Namespace }}}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}-migrate-resources
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/hook: post-upgrade, helm.sh/hook-weight: "200", helm.sh/hook-delete-policy: "{{ $policies }}"}
spec:
  backoffLimit: 2
  template:
    spec:
      serviceAccountName: {{ .Release.Name }}-migrate-resources
      restartPolicy: Never
      containers:
      - {name: kubectl, image: ghcr.io/kyverno/kyverno-cli:v1.15.1, args: [migrate, --resource, clusterpolicies.kyverno.io]}
`

const kyvernoPreDelete = `
{{- $policies := "before-hook-creation,hook-succeeded,hook-failed" }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .Release.Name }}-scale-to-zero
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/hook: pre-delete, helm.sh/hook-weight: "10", helm.sh/hook-delete-policy: "{{ $policies }}"}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}-scale-to-zero
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/hook: pre-delete, helm.sh/hook-weight: "100", helm.sh/hook-delete-policy: "{{ $policies }}"}
spec:
  backoffLimit: 2
  template:
    spec:
      serviceAccountName: {{ .Release.Name }}-scale-to-zero
      restartPolicy: Never
      containers:
      - {name: kubectl, image: docker.io/bitnami/kubectl:1.32, args: [scale, -n, {{ .Release.Namespace }}, deployment, --replicas=0, --all]}
`

const kyvernoTest = `
apiVersion: v1
kind: Pod
metadata:
  name: {{ .Release.Name }}-admission-controller-liveness
  namespace: {{ .Release.Namespace }}
  annotations: {helm.sh/hook: test, helm.sh/hook-delete-policy: "before-hook-creation,hook-succeeded"}
spec:
  restartPolicy: Never
  containers:
  - {name: test, image: "docker.io/library/busybox:1.37", args: [wget, -qO-, "https://{{ .Release.Name }}:9443/health/liveness"]}
`

// tetragonFiles resemble Tetragon's chart: a DaemonSet, an operator that installs the CustomResourceDefinitions itself,
// and files that templates include with tpl.
func tetragonFiles() map[string]string {
	return map[string]string{
		"templates/daemonset.yaml": tetragonAgent,
		"templates/rbac.yaml":      tetragonRoles,
		"templates/config.yaml":    tetragonConfig,
		"files/operator.yaml":      "skip-crd-creation: \"false\"\nnamespace: {{ .Release.Namespace }}\n",
	}
}

const tetragonAgent = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: {{ .Release.Name }}-agent, namespace: {{ .Release.Namespace }}}
spec:
  selector: {matchLabels: {app: {{ .Release.Name }}-agent}}
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}
  template:
    metadata:
      labels: {app: {{ .Release.Name }}-agent}
      annotations: {checksum/configmap: {{ include (print $.Template.BasePath "/config.yaml") . | sha256sum }}}
    spec:
      serviceAccountName: {{ .Release.Name }}
      hostNetwork: true
      dnsPolicy: Default
      tolerations: [{operator: Exists}]
      initContainers:
      - {name: tetragon-rthooks, image: "quay.io/cilium/tetragon-rthooks:v0.6"}
      containers:
      - {name: tetragon, image: "quay.io/cilium/tetragon:v1.5.0", args: [--config-dir=/etc/tetragon], ports: [{name: metrics, containerPort: 2112, hostPort: 2112}]}
      volumes:
      - {name: config, configMap: {name: {{ .Release.Name }}-config}}
`

const tetragonRoles = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: {{ .Release.Name }}}
rules:
- {apiGroups: [""], resources: [pods, services], verbs: [get, list, watch]}
- {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], resourceNames: [tracingpolicies.cilium.io], verbs: [update, get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: {{ .Release.Name }}}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ .Release.Name }}}
subjects:
- {kind: ServiceAccount, name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}}
`

const tetragonConfig = `
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-config, namespace: {{ .Release.Namespace }}}
data:
  export-filename: /var/run/cilium/tetragon/tetragon.log
  operator: |
    {{- tpl (.Files.Get "files/operator.yaml") . | nindent 4 }}
`
