package survey

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// amounts is how much of each resource there is, or is asked for. Those that nearly every pod and node has are fields, to be small.
type amounts struct {
	milliCPU, memory, storage int64
	// others is nil for most pods. It is never changed once it is in the tally of a pod or node.
	others map[corev1.ResourceName]int64
}

// amountsOf reads a list. The number of pods is not among the amounts: pods are counted.
func amountsOf(list corev1.ResourceList) amounts {
	var a amounts
	for name, quantity := range list {
		switch name {
		case corev1.ResourceCPU:
			a.milliCPU = quantity.MilliValue()
		case corev1.ResourceMemory:
			a.memory = quantity.Value()
		case corev1.ResourceEphemeralStorage:
			a.storage = quantity.Value()
		case corev1.ResourcePods:
		default:
			if value := quantity.Value(); value != 0 {
				a.set(name, value)
			}
		}
	}
	return a
}

// set sets another resource.
func (a *amounts) set(name corev1.ResourceName, value int64) {
	if a.others == nil {
		a.others = map[corev1.ResourceName]int64{}
	}
	a.others[name] = value
}

// add adds b as often as times says, which may be negative.
func (a *amounts) add(b amounts, times int64) {
	a.milliCPU += times * b.milliCPU
	a.memory += times * b.memory
	a.storage += times * b.storage
	for name, value := range b.others {
		if sum := a.others[name] + times*value; sum != 0 {
			a.set(name, sum)
		} else {
			delete(a.others, name)
		}
	}
}

// raise makes each amount at least that of b.
func (a *amounts) raise(b amounts) {
	a.milliCPU, a.memory, a.storage = max(a.milliCPU, b.milliCPU), max(a.memory, b.memory), max(a.storage, b.storage)
	for name, value := range b.others {
		if value > a.others[name] {
			a.set(name, value)
		}
	}
}

// quantity returns the amount of one resource.
func (a amounts) quantity(name corev1.ResourceName) resource.Quantity {
	switch name {
	case corev1.ResourceCPU:
		return *resource.NewMilliQuantity(a.milliCPU, resource.DecimalSI)
	case corev1.ResourceMemory:
		return *resource.NewQuantity(a.memory, resource.BinarySI)
	case corev1.ResourceEphemeralStorage:
		return *resource.NewQuantity(a.storage, resource.BinarySI)
	}
	if strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
		return *resource.NewQuantity(a.others[name], resource.BinarySI)
	}
	return *resource.NewQuantity(a.others[name], resource.DecimalSI)
}

// list returns the amounts that are not zero, with the number of pods.
func (a amounts) list(pods int64) corev1.ResourceList {
	list := corev1.ResourceList{}
	names := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}
	for name := range a.others {
		names = append(names, name)
	}
	for _, name := range names {
		if quantity := a.quantity(name); !quantity.IsZero() {
			list[name] = quantity
		}
	}
	if pods != 0 {
		list[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	}
	return list
}

// asked returns what a pod asks for: what its containers do together, or what the hungriest moment of its start does if that is more, and
// the overhead of its runtime. What is asked for the pod as a whole takes the place of what its containers ask.
func asked(spec *corev1.PodSpec) amounts {
	var sum, helpers, start amounts
	for i := range spec.Containers {
		sum.add(amountsOf(spec.Containers[i].Resources.Requests), 1)
	}
	for i := range spec.InitContainers {
		container := &spec.InitContainers[i]
		moment := amountsOf(container.Resources.Requests)
		if container.RestartPolicy != nil && *container.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			// It stays beside all that come after it.
			helpers.add(moment, 1)
			sum.add(moment, 1)
			moment = amounts{}
		}
		moment.add(helpers, 1)
		start.raise(moment)
	}
	sum.raise(start)
	if spec.Resources != nil {
		sum.replace(spec.Resources.Requests)
	}
	sum.add(amountsOf(spec.Overhead), 1)
	return sum
}

// replace sets the amounts that list names.
func (a *amounts) replace(list corev1.ResourceList) {
	whole := amountsOf(list)
	for name := range list {
		switch name {
		case corev1.ResourceCPU:
			a.milliCPU = whole.milliCPU
		case corev1.ResourceMemory:
			a.memory = whole.memory
		case corev1.ResourceEphemeralStorage:
			a.storage = whole.storage
		case corev1.ResourcePods:
		default:
			a.set(name, whole.others[name])
		}
	}
}
